"""Context parallelism on torch.distributed: the tokens of a sequence are sharded over ranks, so that a context is as long as all of their memory.

    from attn.distributed import ContextParallelCache
    cache = ContextParallelCache("int8", heads=8, dim=128, max_tokens=1 << 20)    # on every rank of the group
    cache.append(k, v)          # all ranks pass the rows of all new tokens; each keeps those of its own
    out = cache.attend(q)       # the same result on every rank

A rank attends over its own tokens, the ranks exchange their results and log-sum-exps in one collective, and each merges them in the order of the
tokens. With NCCL on GPUs, with gloo on CPUs.

An engine with pages of its own attends its shard by `attn.torch.Plan.attend`, and merges by `merge_over`, which CUDA graphs can capture.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from ._cache import Cache
from ._errors import CacheFullError, NumberError, ParameterError, SequenceError, ShapeError, UnsupportedError
from ._options import count
from .torch import merge

__all__ = ["SPAN", "ContextParallelCache", "gathered", "merge_over", "tokens_of_rank"]

SPAN = 1024
"""Tokens of a span, which the arithmetic merges as a whole: shards begin at multiples of it."""


def tokens_of_rank(tokens: int, ranks: int) -> int:
    """Tokens of each rank but the last, where a context of so many is shared evenly: whole spans."""
    count("tokens", tokens)
    count("ranks", ranks, 1)
    return -(-tokens // (SPAN * ranks)) * SPAN


def gathered(parts: Sequence[torch.Tensor], group: Any = None) -> List[torch.Tensor]:
    """What all ranks have, by one collective: each of these float32 tensors, which have the same shape on every rank, with the ranks in their order as
    a new first dim.
    """
    ranks = dist.get_world_size(group)
    own = torch.cat([part.reshape(-1) for part in parts])
    everyone = own.new_empty(ranks * own.numel())
    dist.all_gather_into_tensor(everyone, own, group=group)
    rows = everyone.view(ranks, own.numel()).split([part.numel() for part in parts], 1)
    return [row.reshape(ranks, *part.shape) for row, part in zip(rows, parts)]


def merge_over(out: torch.Tensor, lse: torch.Tensor, group: Any = None, *, heads: Optional[slice] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """Merges the ranks' results over disjoint tokens of the same queries: `attn.torch.merge` of what all ranks have.

    Args:
        out: this rank's results, `[query tokens, heads, dim]`; they travel in float32.
        lse: their log-sum-exps, float32 `[query tokens, heads]`; -inf where this rank has no token that the query sees. Sinks belong to one rank.
        group: the ranks, in the order of their tokens; torch's default group if not given.
        heads: which heads this rank wants merged, such as those that its part of the output projection takes; all if not given.

    Returns:
        The merged results, of `out`'s type, and their log-sum-exps. The same inputs give the same bits, on every rank; they are not those of one device.
    """
    if out.dim() != 3 or lse.shape != out.shape[:2]:
        raise ShapeError(f"out has the shape {list(out.shape)}, and lse {list(lse.shape)}; needed: [query tokens, heads, dim] and its first two dims")
    outs, lses = gathered((out.float(), lse.float()), group)
    if heads is not None:
        outs, lses = outs[:, :, heads].contiguous(), lses[:, :, heads].contiguous()
    merged, merged_lse = merge(outs, lses)
    return merged.to(out.dtype), merged_lse


class _Queries(NamedTuple):
    """Query tokens that a rank attends in one call: their rows among all, the sequences, how many of each."""

    rows: List[int]
    sequences: List[int]
    q_lens: List[int]
    causal: bool


class ContextParallelCache:
    """A cache whose tokens are sharded over the ranks of a group: rank r has positions r · share to (r + 1) · share, the last rank also those behind.

    Every rank makes one with the same arguments, and makes the same calls in the same order.

    Args:
        format, heads, dim, sequences, device, and others: as for `attn.Cache`. Formats with a window (`"int4"`, `"int8/int4"`) keep the newest tokens of
            each shard finer than one device would.
        max_tokens: tokens that each sequence has room for, on all ranks together.
        share: positions of a rank, a multiple of 1024; max_tokens shared evenly if not given. A smaller one balances contexts that stay shorter; the
            last rank then has the room for the rest.
        group: the ranks; torch's default group if not given.

    Raises:
        UnsupportedError where torch.distributed is not initialized; those of `attn.Cache`.
    """

    def __init__(
        self, format: str = "int8", *, heads: int, dim: int, max_tokens: int, sequences: int = 1, share: Optional[int] = None, group: Any = None, **options: Any
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError("torch.distributed has no group; call torch.distributed.init_process_group first")
        if options.get("layers", 1) != 1 or "pages" in options:
            raise ParameterError("layers and pages are those of attn.Cache; a ContextParallelCache has one layer, and pages for max_tokens")
        self._group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        max_tokens = count("max_tokens", max_tokens)
        self.share = tokens_of_rank(max_tokens, self.ranks) if share is None else count("share", share)
        if self.share % SPAN:
            raise ParameterError(f"share is {share}; allowed: multiples of {SPAN}, a span of the arithmetic")
        first = self.rank * self.share
        own = max(0, max_tokens - first)
        self._room, self._lens = max_tokens, [0] * count("sequences", sequences)
        self.cache = Cache(format, heads=heads, dim=dim, sequences=sequences, max_tokens=own if self._is_last else min(own, self.share), **options)

    @property
    def _is_last(self) -> bool:
        return self.rank == self.ranks - 1

    @property
    def lens(self) -> List[int]:
        """Tokens of each sequence, on all ranks together."""
        return list(self._lens)

    def _of_rank(self, tokens: int) -> int:
        """How many of a sequence's first tokens this rank has."""
        own = max(0, tokens - self.rank * self.share)
        return own if self._is_last else min(own, self.share)

    def _batch(self, what: str, rows: torch.Tensor, sequences: Any, counts: Any) -> Tuple[List[int], List[int]]:
        if not isinstance(rows, torch.Tensor) or rows.dim() != 3:
            raise ShapeError(f"{what} is no tensor [tokens, heads, dim]")
        sequences = [sequences] if hasattr(sequences, "__index__") else sequences
        sequences = list(range(1 if counts is None else len(counts))) if sequences is None else [count("sequences", s) for s in sequences]
        counts = [rows.shape[0]] if counts is None else [count("tokens of a sequence", n) for n in counts]
        if len(counts) != len(sequences) or sum(counts) != rows.shape[0]:
            raise ShapeError(f"{what} has {rows.shape[0]} tokens, but {len(sequences)} sequences get {counts}")
        if len(set(sequences)) != len(sequences):
            raise ParameterError(f"sequences are {sequences}; allowed: each once")
        for sequence in sequences:
            self._check(sequence)
        return sequences, counts

    def _check(self, sequence: int) -> int:
        if not 0 <= count("sequence", sequence) < len(self._lens):
            raise SequenceError(f"sequence {sequence} does not exist; the cache holds {len(self._lens)}")
        return sequence

    def append(self, k: torch.Tensor, v: torch.Tensor, *, sequences: Union[None, int, Sequence[int]] = None, tokens: Optional[Sequence[int]] = None) -> None:
        """Appends tokens to sequences, as `attn.Cache.append` does: every rank passes the rows of all of them, `[tokens, heads, dim]`, and keeps its own.

        Raises:
            CacheFullError beyond max_tokens, NumberError for NaN and infinity in host memory, on every rank; those of `attn.Cache.append`.
        """
        sequences, counts = self._batch("k", k, sequences, tokens)
        # A rank that refused its own rows alone would have other lengths than the rest.
        for what, rows in (("k", k), ("v", v)):
            if not isinstance(rows, torch.Tensor) or rows.shape != (k.shape[0], self.cache.heads, self.cache.dim):
                raise ShapeError(f"{what} is no tensor [{k.shape[0]}, {self.cache.heads}, {self.cache.dim}]")
            if not rows.is_cuda and not torch.isfinite(rows).all():
                raise NumberError(f"{what} has NaN or infinity; only finite numbers can be attended to: look for the layer that made it")
        for sequence, n in zip(sequences, counts):
            if self._lens[sequence] + n > self._room:
                raise CacheFullError(f"sequence {sequence} has {self._lens[sequence]} tokens and gets {n}, but the cache has room for {self._room}")
        kept, own, start = [], [], 0
        for sequence, n in zip(sequences, counts):
            before = self._lens[sequence]
            first = max(0, self.rank * self.share - before)
            held = self._of_rank(before + n) - self._of_rank(before)
            kept.append((start + first, start + first + held))
            own.append(held)
            start += n
        if len(kept) == 1:
            k, v = (x[slice(*kept[0])] for x in (k, v))
        else:
            k, v = (torch.cat([x[slice(*part)] for part in kept]) for x in (k, v))
        self.cache.append(k, v, sequences=sequences, tokens=own)
        for sequence, n in zip(sequences, counts):
            self._lens[sequence] += n

    def attend(
        self,
        q: torch.Tensor,
        *,
        sequences: Union[None, int, Sequence[int]] = None,
        q_lens: Optional[Sequence[int]] = None,
        scale: Optional[float] = None,
        softcap: Optional[float] = None,
        sinks: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attends over the tokens of all ranks, causally, as `attn.Cache.attend` does: every rank passes the same queries, and gets the same results.

        Args:
            q: `[query tokens, heads, dim]`, sequence after sequence.

        Returns:
            The results, of q's shape and type; with `return_lse` also the log-sum-exps. Their bits depend on the shards alone: not on the batch, and
            not on how many of the tokens are queries. They are not those of one device.
        """
        sequences, q_lens = self._batch("q", q, sequences, q_lens)
        # Results travel and are merged in 32 bits, and are rounded once.
        wide = q.float()
        out = torch.zeros_like(wide, memory_format=torch.contiguous_format)
        lse = torch.full(wide.shape[:2], float("-inf"), device=q.device)
        for part in self._parts(sequences, q_lens):
            options = dict(scale=scale, softcap=softcap, causal=part.causal, sinks=sinks if self.rank == 0 else None)
            if part.rows == list(range(q.shape[0])):
                out, lse = self.cache.attend(wide, sequences=part.sequences, q_lens=part.q_lens, return_lse=True, **options)
                continue
            rows = torch.tensor(part.rows, device=q.device)
            out[rows], lse[rows] = self.cache.attend(wide[rows], sequences=part.sequences, q_lens=part.q_lens, return_lse=True, **options)
        out, lse = merge_over(out, lse, self._group)
        out = out.to(q.dtype)
        return (out, lse) if return_lse else out

    def _parts(self, sequences: List[int], q_lens: List[int]) -> List[_Queries]:
        """The queries that see tokens of this rank: those at its own positions, the last of which stands at its last token, and those behind them."""
        inside, behind = _Queries([], [], [], True), _Queries([], [], [], False)
        start = 0
        for sequence, n in zip(sequences, q_lens):
            length = self._lens[sequence]
            own = self._of_rank(length)
            end = self.rank * self.share + own
            # Queries stand at positions length - n to length - 1.
            before = min(n, max(0, self.rank * self.share - (length - n)))
            at_end = min(n, max(0, end - (length - n)))
            groups = [(inside, before, at_end), (behind, at_end, n)] if own else []
            if own and n - at_end == 1 and at_end == before:
                # One query behind all tokens is what it would be at the last.
                groups = [(inside, at_end, n)]
            for group, first, last in groups:
                if last > first:
                    group.rows.extend(range(start + first, start + last))
                    group.sequences.append(sequence)
                    group.q_lens.append(last - first)
            start += n
        return [group for group in (inside, behind) if group.rows]

    def truncate(self, sequence: int, tokens: int) -> None:
        """Keeps a sequence's first `tokens`, as `attn.Cache.truncate` does."""
        length = self._lens[self._check(sequence)]
        if count("tokens", tokens) > length:
            raise ParameterError(f"tokens is {tokens}, but sequence {sequence} has {length}; allowed: at most as many")
        self.cache.truncate(sequence, self._of_rank(tokens))
        self._lens[sequence] = tokens

    def fork(self, source: int, target: int) -> None:
        """Makes `target`, an empty sequence, share the tokens of `source`."""
        source, target = self._check(source), self._check(target)
        if self._lens[target]:
            raise ParameterError(f"target is sequence {target} of {self._lens[target]} tokens; allowed: an empty sequence; free it first")
        self.cache.fork(source, target)
        self._lens[target] = self._lens[source]

    def free(self, sequence: int) -> None:
        """Empties a sequence."""
        self.cache.free(self._check(sequence))
        self._lens[sequence] = 0
