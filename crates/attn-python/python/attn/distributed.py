"""Context parallelism on torch.distributed: the tokens of a sequence are sharded over ranks, so that a context is as long as all of their memory.

    from attn.distributed import ContextParallelCache
    cache = ContextParallelCache("int8", heads=8, dim=128, max_tokens=1 << 20)    # on every rank of the group
    cache.append(k, v)          # all ranks pass the rows of all new tokens; each keeps those of its own
    out = cache.attend(q)       # the same result on every rank: the bits of one device

A rank attends over its own tokens and leaves a state for each span of 1024 of them; the ranks exchange these in one collective, and merge them in the
order of the tokens, as a single device merges its own. With NCCL on GPUs, with gloo on CPUs.

An engine with pages of its own attends its shard by `attn.torch.Plan.attend_spans`, and merges by `merge_spans_over`, which CUDA graphs can capture.
"""

from __future__ import annotations

import copy
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from . import _errors
from ._cache import Cache
from ._errors import AttnError, CacheFullError, NumberError, ParameterError, SequenceError, ShapeError, UnsupportedError
from ._options import count, counts, flag, one_or_more, refusal
from ._spans import SPAN, TILE, spans_of, tokens_of_rank
from .torch import merge_spans
from .torch._tensors import floats, numbers_on

__all__ = ["SPAN", "ContextParallelCache", "exchanged", "gathered", "merge_spans_over", "tokens_of_rank"]


def _place(group: Any) -> Tuple[int, int]:
    """This process's rank in a group, and the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UnsupportedError("torch.distributed has no group; call torch.distributed.init_process_group first")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise refusal("group", group, "a group of torch.distributed that this process belongs to, or None for all processes")
    return dist.get_rank(group), dist.get_world_size(group)


def _parts(parts: Any) -> List[torch.Tensor]:
    if not isinstance(parts, (list, tuple)) or not parts:
        raise refusal("parts", parts, "float32 tensors, in a list")
    parts = [floats("a part", part) for part in parts]
    for part in parts:
        if part.dtype != torch.float32:
            raise ParameterError(f"a part is of {part.dtype}; allowed: torch.float32")
    return parts


def gathered(parts: Sequence[torch.Tensor], group: Any = None) -> List[torch.Tensor]:
    """What all ranks have, by one collective: each of these float32 tensors, which have the same shape on every rank, with the ranks in their order as
    a new first dim.
    """
    (_, ranks), parts = _place(group), _parts(parts)
    own = torch.cat([part.reshape(-1) for part in parts])
    everyone = own.new_empty(ranks * own.numel())
    dist.all_gather_into_tensor(everyone, own, group=group)
    rows = everyone.view(ranks, own.numel()).split([part.numel() for part in parts], 1)
    return [row.reshape(ranks, *part.shape) for row, part in zip(rows, parts)]


def exchanged(parts: Sequence[torch.Tensor], group: Any = None) -> List[torch.Tensor]:
    """What all ranks have of this rank's heads, by one collective: each of these float32 tensors `[…, heads, n]`, which have the same shape on every rank,
    with the ranks in their order as a new first dim, and of the heads the rank's equal share, in their order.
    """
    (_, ranks), parts = _place(group), _parts(parts)
    for part in parts:
        if part.dim() < 2 or part.shape[-2] % ranks:
            raise ShapeError(f"a tensor has the shape {list(part.shape)}; needed: [..., heads, n], with heads for {ranks} ranks")
    shared = [part.unflatten(-2, (ranks, -1)).movedim(-3, 0) for part in parts]
    own = torch.cat([part.reshape(ranks, -1) for part in shared], 1)
    everyone = torch.empty_like(own)
    dist.all_to_all_single(everyone, own, group=group)
    rows = everyone.split([part[0].numel() for part in shared], 1)
    return [row.reshape(part.shape) for row, part in zip(rows, shared)]


def merge_spans_over(
    format: str,
    max_sums: torch.Tensor,
    o: torch.Tensor,
    group: Any = None,
    *,
    kv_heads: int,
    own_heads: bool = False,
    dtype: Optional[torch.dtype] = None,
    sinks: Optional[torch.Tensor] = None,
    v_scales: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Merges the states that the ranks have left of their shards: `attn.torch.merge_spans` of what all ranks have.

    Args:
        max_sums, o: this rank's states, `[spans, query tokens, heads, 2]` and `[spans, query tokens, heads, dim]`; as many spans on every rank, which
            the spans of the longest shard are: those that a shard does not have see no token.
        group: the ranks, in the order of their tokens; torch's default group if not given.
        kv_heads: KV heads of all heads.
        own_heads: each rank merges its equal share of the heads, such as those that its part of the output projection takes, and receives no others.
        format, dtype, sinks, v_scales: as for `attn.torch.merge_spans`; those of all heads.

    Returns:
        The results and log-sum-exps of all heads, or of the rank's own: for integer formats the bits of one device over all tokens.
    """
    (rank, ranks), own_heads, kv_heads = _place(group), flag("own_heads", own_heads), count("kv_heads", kv_heads, 1)
    for what, x in (("max_sums", max_sums), ("o", o)):
        if floats(what, x).dim() != 4:
            raise ShapeError(f"{what} has the shape {list(x.shape)}; needed: [spans, query tokens, heads, 2 or dim]")
    if own_heads:
        if kv_heads % ranks:
            raise ShapeError(f"kv_heads is {kv_heads}; needed: as many for each of {ranks} ranks, for own_heads=True")
        sinks, v_scales = (numbers_on(what, x, o.device) for what, x in (("sinks", sinks), ("v_scales", v_scales)))
        for what, x, heads in (("sinks", sinks, o.shape[2]), ("v_scales", v_scales, kv_heads)):
            if x is not None and x.numel() != heads:
                raise ShapeError(f"{what} has {x.numel()} numbers; needed: {heads}, one for each head of all ranks")
        kv_heads //= ranks
        sinks, v_scales = (None if x is None else x.chunk(ranks)[rank] for x in (sinks, v_scales))
    max_sums, o = (x.flatten(0, 1).contiguous() for x in (exchanged if own_heads else gathered)((max_sums, o), group))
    return merge_spans(format, max_sums, o, kv_heads=kv_heads, dtype=dtype, sinks=sinks, v_scales=v_scales)


def _check_numbers(what: str, rows: torch.Tensor, largest: float, format: str) -> None:
    """Refuses numbers that a cache of this format does not take, whose magnitudes end at `largest`."""
    if not torch.isfinite(rows).all():
        raise NumberError(f"{what} has NaN or infinity; only finite numbers can be attended to: look for the layer that made it")
    if torch.finfo(rows.dtype).max > largest and not (rows.abs() <= largest).all():
        raise NumberError(f"{what} has a number of magnitude {float(rows.abs().max()):g}; {format} takes magnitudes up to {largest:g}: look for the layer that made it")


class ContextParallelCache:
    """A cache whose tokens are sharded over the ranks of a group: rank r has positions r · share to (r + 1) · share, the last rank also those behind.

    Every rank makes one with the same arguments, and makes the same calls in the same order. What one rank refuses all of them refuse, with the same error,
    and nothing is changed on any. Where a rank cannot know it, which is of formats with a window (`"int4"`, `"int8/int4"`) alone, they ask each other:
    one more small collective for a `truncate`, and for an `attend` of other queries than the tokens of the sequences' last append.

    Args:
        format, heads, dim, sequences, device, and others: as for `attn.Cache`.
        max_tokens: tokens that each sequence has room for, on all ranks together.
        share: positions of a rank, a multiple of 1024; max_tokens shared evenly if not given. A smaller one balances contexts that stay shorter; the
            last rank then has the room for the rest.
        group: the ranks; torch's default group if not given.

    Raises:
        UnsupportedError where torch.distributed is not initialized; those of `attn.Cache`.
    """

    def __init__(
        self, format: str = "int8", *, heads: int, dim: int, max_tokens: int, v_dim: Optional[int] = None, sequences: int = 1, share: Optional[int] = None, group: Any = None, **options: Any
    ) -> None:
        self._group, (self.rank, self.ranks) = group, _place(group)
        if count("layers", options.get("layers", 1)) != 1 or "pages" in options:
            raise ParameterError("layers and pages are those of attn.Cache; a ContextParallelCache has one layer, and pages for max_tokens")
        max_tokens = count("max_tokens", max_tokens)
        self.share = tokens_of_rank(max_tokens, self.ranks) if share is None else count("share", share)
        if self.share % SPAN:
            raise ParameterError(f"share is {share}; allowed: multiples of {SPAN}, a span of the arithmetic")
        self.cache = Cache(format, heads=heads, dim=dim, v_dim=v_dim, sequences=sequences, max_tokens=self._of_rank(max_tokens), **options)
        # Keys of later shards lack the centres of the first one, whose first tile is all that these come from.
        self._first_tiles: Optional[Cache] = None
        if self.rank > 0 and self.cache.centres:
            self._first_tiles = Cache(format, heads=heads, dim=dim, v_dim=v_dim, sequences=sequences, max_tokens=TILE, **options)
        self._room, self._lens = max_tokens, [0] * self.cache.sequences
        # The newest tokens of each sequence that can be queries on every rank, whatever residuals it has.
        self._newest = [0] * len(self._lens)

    @property
    def lens(self) -> List[int]:
        """Tokens of each sequence, on all ranks together."""
        return list(self._lens)

    def _of_rank(self, tokens: int, rank: Optional[int] = None) -> int:
        """How many of a sequence's first tokens a rank has: this one, if none is given."""
        rank = self.rank if rank is None else rank
        own = max(0, tokens - rank * self.share)
        return own if rank == self.ranks - 1 else min(own, self.share)

    def _batch(self, what: str, rows: torch.Tensor, sequences: Any, tokens_name: str, tokens: Any) -> Tuple[List[int], List[int]]:
        if floats(what, rows).dim() != 3:
            raise ShapeError(f"{what} is no tensor [tokens, heads, dim]")
        each = [rows.shape[0]] if tokens is None else counts(tokens_name, tokens)
        sequences = list(range(len(each))) if sequences is None else one_or_more("sequences", sequences)
        if len(each) != len(sequences) or sum(each) != rows.shape[0]:
            raise ShapeError(f"{what} has {rows.shape[0]} tokens, but {len(sequences)} sequences get {each}")
        if len(set(sequences)) != len(sequences):
            raise ParameterError(f"sequences are {sequences}; allowed: each once")
        for sequence in sequences:
            self._check(sequence)
        return sequences, each

    def _check(self, sequence: int) -> int:
        if not 0 <= count("sequence", sequence) < len(self._lens):
            raise SequenceError(f"sequence {sequence} does not exist; the cache holds {len(self._lens)}")
        return sequence

    def append(self, k: torch.Tensor, v: torch.Tensor, *, sequences: Union[None, int, Sequence[int]] = None, tokens: Optional[Sequence[int]] = None) -> None:
        """Appends tokens to sequences, as `attn.Cache.append` does: every rank passes the rows of all of them, `[tokens, heads, dim]`, and keeps its own.

        Raises:
            CacheFullError beyond max_tokens, NumberError for NaN, infinity and numbers that the format does not take in host memory, on every rank; those of `attn.Cache.append`.
        """
        sequences, each = self._batch("k", k, sequences, "tokens", tokens)
        # A rank that refused its own rows alone would have other lengths than the rest.
        for what, rows, largest in zip(("k", "v"), (k, v), self.cache._cache.largest):
            shape = (k.shape[0], self.cache.heads, self.cache.v_dim if what == "v" else self.cache.dim)
            if floats(what, rows).shape != shape:
                raise ShapeError(f"{what} is no tensor {list(shape)}")
            if not rows.is_cuda:
                _check_numbers(what, rows, largest, self.cache.format)
        for sequence, n in zip(sequences, each):
            if self._lens[sequence] + n > self._room:
                raise CacheFullError(f"sequence {sequence} has {self._lens[sequence]} tokens and gets {n}, but the cache has room for {self._room}")
        try:
            told = self._append_own(k, v, sequences, each)
        except BaseException:
            self._keep_first_tiles(sequences)
            raise
        for sequence, n in zip(sequences, each):
            self._lens[sequence] += n
            self._newest[sequence] = min(n, self.cache._options.max_q_len)
        if told is not None:
            raise told

    def _append_own(self, k: torch.Tensor, v: torch.Tensor, sequences: List[int], each: List[int]) -> Optional[RuntimeWarning]:
        """Appends those of the rows that are this rank's, of so many tokens of each sequence. Returns a warning of which a filter makes an error: its tokens are in the cache."""
        kept, own, start = [], [], 0
        for sequence, n in zip(sequences, each):
            before = self._lens[sequence]
            self._take_first_tile(sequence, k[start : start + n], v[start : start + n])
            first = max(0, self.rank * self.share - before)
            held = self._of_rank(before + n) - self._of_rank(before)
            kept.append((start + first, start + first + held))
            own.append(held)
            start += n
        if len(kept) == 1:
            k, v = (x[slice(*kept[0])] for x in (k, v))
        else:
            k, v = (torch.cat([x[slice(*part)] for part in kept]) for x in (k, v))
        try:
            self.cache.append(k, v, sequences=sequences, tokens=own)
        except RuntimeWarning as warning:
            return warning
        return None

    def _take_first_tile(self, sequence: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Takes what the tokens that come next have of a sequence's first tile; with its last one this rank's shard begins."""
        held = self._lens[sequence]
        if self._first_tiles is None or held >= TILE or len(k) == 0:
            return
        try:
            self._first_tiles.append(k[: TILE - held], v[: TILE - held], sequences=sequence)
        except RuntimeWarning:
            # The rank whose tokens these are says the same of them.
            pass
        if held + len(k) >= TILE:
            self.cache.begin_shard(sequence, self.rank * self.share, self._first_tiles.shard_centres(sequence))

    def _keep_first_tiles(self, sequences: Sequence[int]) -> None:
        """Takes tokens out of first tiles that the sequences do not have."""
        for sequence in sequences if self._first_tiles is not None else ():
            self._first_tiles.truncate(sequence, min(self._lens[sequence], self._first_tiles.lens[sequence]))

    def _agree(self, refusal: Optional[AttnError]) -> None:
        """Raises on all ranks what the first rank with a refusal refuses; each passes its own, or none."""
        device = torch.device(self.cache.device if dist.get_backend(self._group) == "nccl" else "cpu")
        first = torch.tensor([self.ranks if refusal is None else self.rank], device=device)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self._group)
        rank = int(first)
        if rank == self.ranks:
            return
        said = [None if refusal is None else (type(refusal).__name__, str(refusal))]
        dist.broadcast_object_list(said, dist.get_global_rank(self._group or dist.group.WORLD, rank), group=self._group, device=device)
        name, sentence = said[0]
        raise getattr(_errors, name)(f"rank {rank}, whose tokens begin at {rank * self.share}: {sentence}") from refusal

    def attend(
        self,
        q: torch.Tensor,
        *,
        sequences: Union[None, int, Sequence[int]] = None,
        q_lens: Optional[Sequence[int]] = None,
        scale: Optional[float] = None,
        causal: bool = True,
        softcap: Optional[float] = None,
        window_left: Optional[int] = None,
        chunk: Optional[int] = None,
        alibi_slopes: Optional[Sequence[float]] = None,
        sinks: Optional[Sequence[float]] = None,
        return_lse: bool = False,
    ) -> Any:
        """Attends over the tokens of all ranks, as `attn.Cache.attend` does: every rank passes the same queries, and gets the same results.

        Every rank receives the states of all spans, `4 (v_dim + 2)` bytes for each span, query token and head: pass long prompts in pieces.

        Args:
            q: `[query tokens, heads, dim]`, sequence after sequence; others as for `attn.Cache.attend`.

        Returns:
            The results, of q's type and of its shape with v_dim as the last dim; with `return_lse` also the log-sum-exps. Of integer formats they have the bits of one device over all
            tokens, whatever the shards; of others they do on CPUs.
        """
        sequences, q_lens = self._batch("q", q, sequences, "q_lens", q_lens)
        return_lse = flag("return_lse", return_lse)
        lens = [self._lens[sequence] for sequence in sequences]
        refusal, states = None, ()
        try:
            states = self.cache.attend_spans(
                q,
                sequences=sequences,
                q_lens=q_lens,
                # A rank whose tokens are still to come sees nothing.
                tokens_before=[self.rank * self.share if self._of_rank(n) else 0 for n in lens],
                tokens_after=[max(0, n - self.rank * self.share - self._of_rank(n)) for n in lens],
                spans=self._spans(max(lens, default=0)),
                scale=scale,
                causal=causal,
                softcap=softcap,
                window_left=window_left,
                chunk=chunk,
                alibi_slopes=alibi_slopes,
            )
        except AttnError as error:
            refusal = error
        # A rank may lack the residuals that older tokens read as queries, and the others would wait for its states.
        if self.cache._cache.has_window and any(n > self._newest[sequence] for sequence, n in zip(sequences, q_lens)):
            self._agree(refusal)
        if refusal is not None:
            raise refusal
        sinks, v_scales = (numbers_on(what, x, q.device) for what, x in (("sinks", sinks), ("v_scales", self.cache._options.v_scales)))
        out, lse = merge_spans_over(
            self.cache.format, *states, self._group, kv_heads=self.cache.heads, dtype=q.dtype, sinks=sinks, v_scales=v_scales
        )
        return (out, lse) if return_lse else out

    def _spans(self, tokens: int) -> int:
        """Spans of the longest shard of a sequence."""
        return spans_of(max(self._of_rank(tokens, rank) for rank in (0, self.ranks - 1)))

    def truncate(self, sequence: int, tokens: int) -> None:
        """Keeps a sequence's first `tokens`, as `attn.Cache.truncate` does, on all ranks or on none.

        Raises:
            ParameterError for more tokens than the sequence has, ShapeError for fewer than the residuals of a rank reach back to, SequenceError.
        """
        length = self._lens[self._check(sequence)]
        if count("tokens", tokens) > length:
            raise ParameterError(f"tokens is {tokens}, but sequence {sequence} has {length}; allowed: at most as many")
        own = self._of_rank(tokens)
        if self.cache._cache.has_window:
            refusal = None
            try:
                self.cache._cache.check_truncate(sequence, own)
            except AttnError as error:
                refusal = error
            self._agree(refusal)
        self.cache.truncate(sequence, own)
        self._lens[sequence] = tokens
        self._keep_first_tiles([sequence])
        self._newest[sequence] = 0

    def fork(self, source: int, target: int) -> None:
        """Makes `target`, an empty sequence, share the tokens of `source`."""
        source, target = self._check(source), self._check(target)
        if self._lens[target]:
            raise ParameterError(f"target is sequence {target} of {self._lens[target]} tokens; allowed: an empty sequence; free it first")
        self.cache.fork(source, target)
        if self._first_tiles is not None:
            self._first_tiles.fork(source, target)
        self._lens[target], self._newest[target] = self._lens[source], self._newest[source]

    def free(self, sequence: int) -> None:
        """Empties a sequence."""
        self.cache.free(self._check(sequence))
        if self._first_tiles is not None:
            self._first_tiles.free(sequence)
        self._lens[sequence] = self._newest[sequence] = 0

    def __copy__(self) -> "ContextParallelCache":
        """A cache of its own with the same sequences, over the same ranks."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, cache=copy.copy(self.cache), _lens=list(self._lens), _newest=list(self._newest))
        made._first_tiles = None if self._first_tiles is None else copy.copy(self._first_tiles)
        return made

    def __deepcopy__(self, memo: Any) -> "ContextParallelCache":
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise UnsupportedError("a cache over ranks cannot be pickled, since its pages and its group are of this process; make one on each rank, and append its tokens")
