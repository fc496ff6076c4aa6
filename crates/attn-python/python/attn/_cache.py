"""`attn.Cache`: a paged, quantized KV cache and attention over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence, Tuple, Union

from . import _attn
from ._arrays import Results, Rows, _numpy
from ._errors import ParameterError, ShapeError, UnsupportedError
from ._image import SequenceImage
from ._options import Modifiers, check_values, count, counts, device_name, flag, format_name, head_dim, numbers, one_or_more, optional_count, selected_pages
from ._spans import MOST_SPANS, spans_of
from ._stats import CacheStats


@dataclass(frozen=True)
class _CacheOptions:
    format: str
    q_heads: Optional[int]
    heads: int
    dim: int
    v_dim: int
    max_tokens: int
    sequences: int
    layers: int
    pages: Optional[int]
    page_size: int
    max_q_len: int
    checkpoints: int
    k_scales: Optional[List[float]]
    v_scales: Optional[List[float]]
    centres: Optional[bool]


@dataclass(frozen=True)
class _StepOptions:
    sequences: List[int]
    q_lens: List[int]
    layer: int
    modifiers: Modifiers
    tokens_before: List[int] = field(default_factory=list)
    tokens_after: List[int] = field(default_factory=list)
    pages: Optional[Tuple[List[int], List[int]]] = None


def _of_sequences(name: str, tokens: Optional[Sequence[int]], sequences: List[int]) -> List[int]:
    """Counts of tokens of other shards, one for each sequence; none if not given."""
    found = [] if tokens is None else counts(name, tokens)
    if found and len(found) != len(sequences):
        raise ShapeError(f"{name} has {len(found)} counts for {len(sequences)} sequences")
    return found


class Cache:
    """A paged, quantized KV cache of one attention layer or of several, for several sequences, and attention over it.

    Rows are numpy arrays, torch tensors (CPU and CUDA), or anything with `__dlpack__`, in float32, float16 or bfloat16. On the CPU they are read in
    place wherever their last dim is contiguous and none runs backwards, such as parts of a fused projection and transposed arrays; nothing may write
    between them meanwhile. Results come as what the queries are. Attention over integer formats gives the same bits on every device, for any batch, and whether a token is decoded alone,
    verified among drafts, or part of a prompt.

    Args:
        format: `"int8"`, `"int4"`, `"int8/int4"` (K/V), `"bf16"`, `"f16"`, `"fp8"`, or another name of the table of formats. `"int8-latents"` stores the rows of latent
            attention (MLA) once: V is the first v_dim dims of K; so do `"bf16-latents"`, `"f16-latents"` and `"fp8-latents"`.
        heads: KV heads.
        dim: dims of a head: 64, 80, 96, 128, 160, 192, 256, 320, 512 or 576.
        max_tokens: tokens that each sequence has room for.
        v_dim: dims of a value and of a result, where they are not those of a key and a query.
        sequences: sequences, numbered from 0, all empty.
        layers: layers of a model that have the same shape: lengths and pages in common, a pool for each. A step is reserved once, then written
            layer by layer: `reserve`, `write`.
        q_heads: query heads of the steps to come, where they are known: a number that no step can have is refused here rather than by the first one.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, `"wgpu"`; None: what `ATTN_BACKEND` names, else the best here.
        pages: pages of the pool, in place of enough for `max_tokens` of every sequence.
        page_size: tokens of a page: 16, 32, 64 or 128.
        max_q_len: most query tokens of a sequence in a step, for formats with a window (`"int4"`, `"int8/int4"`); others take any number.
        checkpoints: for formats with a window, tokens after which, again and again, a sequence keeps what `truncate` needs to leave it so long, as a radix tree asks: a multiple
            of 64 and of `page_size`, such as 1024; 0 for none. `stats().checkpoint_bytes` says what each takes: with pages of 64 tokens and windows of 128, two pages in each
            layer. Other formats are truncated to any length, and the number costs nothing there.
        k_scales, v_scales: static scales, one for each head, or for each layer and head, which `"fp8"` and `"int8-tensor"` need: the largest magnitude to
            come, divided by 448 or by 127. Larger numbers saturate, and are counted: `stats()`.
        centres: store each sequence's keys without what they have in common, the first token's key in the first 64 tokens, their mean in all later ones.
            Errors get smaller, and biases of K cost nothing. None: for `"int8"`, `"int8/int4"`, `"int4"` and their like; True is refused for others.

    `copy.copy` and `copy.deepcopy` give a cache of its own with the same sequences. A cache can be neither pickled nor used in a process that was forked
    from the one that made it: start that one with multiprocessing's "spawn", and send sequences by `save`.

    Raises:
        ParameterError, UnsupportedError, OutOfMemoryError, DeviceError.

    >>> import numpy, attn
    >>> cache = attn.Cache("int8", heads=1, dim=64, max_tokens=1024, device="cpu")
    >>> cache.append(numpy.full((3, 1, 64), 0.5, "f"), numpy.full((3, 1, 64), 2.0, "f"))
    >>> out = cache.attend(numpy.ones((1, 4, 64), "f"))
    >>> out.shape, bool(abs(out - 2).max() < 0.02)
    ((1, 4, 64), True)
    """

    def __init__(
        self,
        format: str = "int8",
        *,
        heads: int,
        dim: int,
        max_tokens: int,
        v_dim: Optional[int] = None,
        sequences: int = 1,
        layers: int = 1,
        q_heads: Optional[int] = None,
        device: Optional[str] = None,
        pages: Optional[int] = None,
        page_size: int = 64,
        max_q_len: int = 64,
        checkpoints: int = 0,
        k_scales: Optional[Sequence[float]] = None,
        v_scales: Optional[Sequence[float]] = None,
        centres: Optional[bool] = None,
    ) -> None:
        self._options = _CacheOptions(
            format=format_name(format),
            q_heads=optional_count("q_heads", q_heads, 1),
            heads=count("heads", heads, 1),
            dim=count("dim", dim, 1),
            v_dim=count("v_dim", dim if v_dim is None else v_dim, 1),
            max_tokens=count("max_tokens", max_tokens),
            sequences=count("sequences", sequences),
            layers=count("layers", layers, 1),
            pages=optional_count("pages", pages),
            page_size=count("page_size", page_size, 1),
            max_q_len=count("max_q_len", max_q_len),
            checkpoints=count("checkpoints", checkpoints),
            k_scales=numbers("k_scales", k_scales),
            v_scales=numbers("v_scales", v_scales),
            centres=None if centres is None else flag("centres", centres),
        )
        self._cache = _attn.Cache(self._options, device_name(device))

    @property
    def format(self) -> str:
        """The formats of K and V."""
        return self._options.format

    @property
    def heads(self) -> int:
        """KV heads."""
        return self._options.heads

    @property
    def dim(self) -> int:
        """Dims of a head's key and query."""
        return self._options.dim

    @property
    def v_dim(self) -> int:
        """Dims of a head's value, and of a result."""
        return self._options.v_dim

    @property
    def centres(self) -> bool:
        """Whether keys are stored without what a sequence's have in common."""
        return self._cache.centres

    @property
    def sequences(self) -> int:
        """Sequences, empty ones included."""
        return len(self.lens)

    @property
    def layers(self) -> int:
        """Layers."""
        return self._options.layers

    @property
    def device(self) -> str:
        """Where the pages lie: `"cpu"`, `"cuda:0"`, `"wgpu"`."""
        return self._cache.device

    @property
    def lens(self) -> List[int]:
        """Cached tokens of each sequence."""
        return self._cache.lens()

    @property
    def first_tokens(self) -> List[int]:
        """The first token of each sequence that `drop_before` has kept; 0 where it has dropped none."""
        return self._cache.first_tokens()

    def stats(self) -> CacheStats:
        """Pages, bytes, tokens, numbers that have saturated, and how uneven keys are."""
        own = self._cache
        return CacheStats(own.num_pages(), own.free_pages(), own.page_bytes, sum(self.lens), self.layers, own.saturated(), own.key_outliers(), own.checkpoint_bytes)

    def _layer(self, layer: Optional[int]) -> int:
        if layer is None and self.layers != 1:
            raise ParameterError(f"layer is missing; the cache has {self.layers}")
        return count("layer", 0 if layer is None else layer)

    def _batch(self, what: str, rows: Rows, sequences: Any, tokens_name: str, tokens: Any) -> Tuple[List[int], List[int]]:
        """The sequences of a call and their tokens, which the argument of this name counts; rows are `[tokens, heads, dim]` or `[sequences, tokens, heads, dim]`."""
        if len(rows.shape) not in (3, 4):
            raise ShapeError(f"{what} has the shape {list(rows.shape)}; needed: [tokens, heads, dim] or [sequences, tokens, heads, dim]")
        is_batch = len(rows.shape) == 4
        each = None if tokens is None else counts(tokens_name, tokens)
        if sequences is None:
            sequences = list(range(rows.shape[0] if is_batch else 1 if each is None else len(each)))
        else:
            sequences = one_or_more("sequences", sequences)
        if is_batch:
            if len(sequences) != rows.shape[0]:
                raise ShapeError(f"{what} has rows for {rows.shape[0]} sequences, but sequences names {len(sequences)}")
            if each is not None:
                raise ParameterError(f"{what} of four dims has as many tokens for each sequence; pass three dims for other counts")
            return sequences, [rows.shape[1]] * rows.shape[0]
        if each is None:
            if len(sequences) != 1:
                raise ParameterError(f"{what} has {rows.shape[0]} tokens for {len(sequences)} sequences; say how many each gets: {tokens_name}")
            return sequences, [rows.shape[0]]
        return sequences, each

    def append(
        self,
        k: Any,
        v: Any = None,
        *,
        sequences: Union[None, int, Sequence[int]] = None,
        tokens: Optional[Sequence[int]] = None,
    ) -> None:
        """Appends tokens to sequences: to all of them, or to none if anything is refused. For a cache of one layer; others: `reserve`, `write`.

        Args:
            k, v: `[tokens, heads, dim]`, the tokens of one sequence after those of another; or `[sequences, tokens, heads, dim]`; of V v_dim. K is what queries
                are multiplied with: after the positions are rotated in. Of latents (`"int8-latents"`) v is None: it is the first v_dim dims of k.
            sequences: which get them, each once; the first ones if not given.
            tokens: how many each gets, where `k` has three dims and there are several sequences.

        Raises:
            ShapeError, SequenceError, CacheFullError, ParameterError; NumberError for NaN and infinity in host memory (numbers on a GPU are not
            looked at, unless `ATTN_CUDA=check=1` is set).
        """
        k, v = self._rows(k, v)
        sequences, tokens = self._batch("k", k, sequences, "tokens", tokens)
        k, v, stream = self._new_rows(k, v)
        self._cache.append(k, v, sequences, tokens, stream)

    def _rows(self, k: Any, v: Any) -> Tuple[Rows, Optional[Rows]]:
        """K, and V where it is no part of K."""
        k = Rows("k", k)
        check_values(self.format, v)
        return k, None if v is None else Rows("v", v)

    @staticmethod
    def _new_rows(k: Rows, v: Optional[Rows]) -> Tuple[Any, Any, Optional[int]]:
        """K and V as capsules, and the stream that they are ready on."""
        if v is None:
            stream = k.stream()
            return k.flat("k", 3).with_rows_together().capsule(stream), None, stream
        if k.shape[:-1] != v.shape[:-1]:
            raise ShapeError(f"k has the shape {list(k.shape)}, and v {list(v.shape)}; pass as many rows of both")
        stream = k.stream()
        k, v = (rows.flat(what, 3).with_rows_together() for what, rows in (("k", k), ("v", v)))
        return k.capsule(stream), v.capsule(stream), stream

    def reserve(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        """Begins a step of a model: takes the pages of so many new tokens of each of these sequences, in all layers, and counts the tokens.

        `write` then writes them layer by layer, and a layer that is written can be attended; the last one's write ends the step. Until then these
        sequences are neither forked, truncated, freed, dropped from nor saved, and `cancel_step` takes the whole step back.

        >>> import numpy, attn
        >>> cache = attn.Cache("int8", heads=1, dim=64, max_tokens=1024, layers=2, device="cpu")
        >>> k, v, q = numpy.full((3, 1, 64), 0.5, "f"), numpy.full((3, 1, 64), 2.0, "f"), numpy.ones((1, 4, 64), "f")
        >>> cache.reserve([0], [3])
        >>> for layer in range(2):
        ...     cache.write(layer, k, v)
        ...     out = cache.attend(q, layer=layer)
        >>> cache.lens, cache.open_step
        ([3], None)

        Raises:
            SequenceError, CacheFullError; ParameterError for a sequence named twice; ShapeError while another step is open. Nothing is changed then.
        """
        self._cache.reserve(one_or_more("sequences", sequences), one_or_more("tokens", tokens))

    def write(self, layer: int, k: Any, v: Any = None) -> None:
        """Writes one layer's K and V of the tokens that `reserve` has counted. Layers come in any order, each once.

        Args:
            k, v: as for `append`, the sequences in the order of `reserve`.

        Raises:
            ParameterError for a layer that the cache does not have; ShapeError for other than the step's rows, without an open step, and for a layer
            that it has written; NumberError. The layer counts as not written then: write it again, or `cancel_step`.
        """
        k, v = self._rows(k, v)
        step = self.open_step
        if len(k.shape) == 4 and step is not None and [n for _, n in step] != [k.shape[1]] * k.shape[0]:
            raise ShapeError(f"k has {k.shape[1]} tokens for each of {k.shape[0]} sequences, but the step has {[n for _, n in step]}; pass three dims for other counts")
        k, v, stream = self._new_rows(k, v)
        self._cache.write(count("layer", layer), k, v, stream)

    def cancel_step(self) -> None:
        """Takes the open step back, whichever layers were written: lengths and pages are those before `reserve`. Nothing without an open step."""
        self._cache.cancel_step()

    @property
    def open_step(self) -> Optional[List[Tuple[int, int]]]:
        """The sequences of the step that `reserve` began, and the tokens of each, until its last layer is written; else None."""
        return self._cache.open_step()

    def attend(
        self,
        q: Any,
        *,
        layer: Optional[int] = None,
        sequences: Union[None, int, Sequence[int]] = None,
        q_lens: Optional[Sequence[int]] = None,
        scale: Optional[float] = None,
        causal: bool = True,
        softcap: Optional[float] = None,
        window_left: Optional[int] = None,
        chunk: Optional[int] = None,
        alibi_slopes: Optional[Sequence[float]] = None,
        sinks: Optional[Sequence[float]] = None,
        pages: Any = None,
        arithmetic: str = "exact",
        out: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attends over cached tokens. The tokens of a step are appended first; the last query token stands at a sequence's last cached token.

        Args:
            q: `[query tokens, query heads, dim]`, sequence after sequence; or `[sequences, query tokens, query heads, dim]`. Query heads are a
                multiple of the KV heads.
            layer: which layer; needed where the cache has several.
            sequences: which are attended, in any order; the first ones if not given.
            q_lens: query tokens of each, where `q` has three dims and there are several sequences.
            scale: the factor of q·k; 1/√dim if not given.
            causal: whether query token i sees only the tokens up to its own position.
            softcap: scores become `softcap · tanh(score / softcap)`.
            window_left: tokens before its own position that a token sees; transformers' `sliding_window` is one more.
            chunk: tokens of a chunk: a token sees those of its own chunk alone, as Llama 4's layers with rotary positions do.
            alibi_slopes, sinks: a number for each query head.
            pages: block-sparse attention: the pages that each KV head attends, `[sequences, KV heads, pages]`, lists or an array in which -1 fills up shorter ones; the host reads
                them, which waits for an array on a GPU. Page i has the tokens from `i * page_size` on. For one query token of each sequence, without
                other arguments that go by a token's place or by the head, and static scales that are the same for all KV heads. In a cache with centres of K, and in formats with a
                window, the pages of a sequence's first 64 tokens are among them, and in the latter its newest pages: those of the window. The results have the bits of
                sequences that consist of these tokens alone.
            arithmetic: `"exact"`, or `"fast"`: steps of an integer format in which some sequence has more than 16 query tokens may be computed by floats,
                which is faster on a GPU with tensor cores. The answer is as near to attention over the same cache, but no bits are promised. It takes a cache with
                `centres=False`; over centres of K steps are exact.
            out: where the results go, of q's type and shape, with v_dim as the last dim; on the CPU at any strides with a contiguous last dim and rows that do not overlap, on a
                GPU contiguous. It may lie between the queries, or be them, on the CPU.
            return_lse: whether the logarithms of the softmax's sums are returned, too.

        Returns:
            The results, of q's type and library, and of its shape with v_dim as the last dim; with `return_lse` also the log-sum-exps, float32, of q's shape without
            its last dim.

        Raises:
            ShapeError, SequenceError, ParameterError, UnsupportedError, DeviceError; NumberError for NaN and infinity in host memory.
        """
        rows = Rows("q", q)
        sequences, q_lens = self._batch("q", rows, sequences, "q_lens", q_lens)
        options = _StepOptions(
            sequences=sequences,
            q_lens=q_lens,
            layer=self._layer(layer),
            modifiers=Modifiers.of(scale, causal, softcap, window_left, chunk, alibi_slopes, sinks, arithmetic),
            pages=selected_pages("pages", pages, [len(sequences), self.heads]),
        )
        results = Results(rows, self.v_dim, out, flag("return_lse", return_lse))
        stream = rows.stream()
        self._cache.attend(
            rows.contiguous().flat("q", 3).with_rows_together().capsule(stream),
            results.out.flat("out", 3).capsule(stream),
            None if results.lse is None else results.lse.flat("lse", 2).capsule(stream),
            options,
            stream,
        )
        return results.arrays()

    def attend_spans(
        self,
        q: Any,
        *,
        layer: Optional[int] = None,
        sequences: Union[None, int, Sequence[int]] = None,
        q_lens: Optional[Sequence[int]] = None,
        tokens_before: Optional[Sequence[int]] = None,
        tokens_after: Optional[Sequence[int]] = None,
        spans: Optional[int] = None,
        scale: Optional[float] = None,
        causal: bool = True,
        softcap: Optional[float] = None,
        window_left: Optional[int] = None,
        chunk: Optional[int] = None,
        alibi_slopes: Optional[Sequence[float]] = None,
    ) -> Tuple[Any, Any]:
        """Attends over shards: the cache has a run of each sequence's tokens, and other caches, on any devices, have the rest. A shard begins at a multiple
        of 1024 tokens of its sequence, a span, and ends at one but where the sequence ends. `attn.merge_spans` makes the bits of one device of what all
        shards leave, where the format is an integer one. On the CPU and on CUDA devices.

        Args:
            tokens_before: tokens of each sequence that lie in shards ahead, multiples of 1024: a shard with none ahead has the sequence's first tile, which
                formats with a window read finely. None lie ahead if not given.
            tokens_after: tokens of each sequence that follow in other shards; queries are the last tokens of all. None follow if not given.
            spans: states to return, at least those that the longest sequence's tokens here have, such as the number that the longest shard of all
                has; as many as needed if not given.
            q, and others: as for `attend`. Sinks belong to `attn.merge_spans`.

        Returns:
            float32 `[spans, query tokens, heads, 2]`, maxima, which are -inf where a query sees no token of a span, and sums; and `[spans, query tokens,
            heads, dim]`; of q's library.

        Raises:
            Those of `attend`; ParameterError for a shard that ends inside a span though tokens follow, and for part of a span ahead.
        """
        rows = Rows("q", q)
        sequences, q_lens = self._batch("q", rows, sequences, "q_lens", q_lens)
        before = _of_sequences("tokens_before", tokens_before, sequences)
        after = _of_sequences("tokens_after", tokens_after, sequences)
        options = _StepOptions(
            sequences=sequences,
            q_lens=q_lens,
            layer=self._layer(layer),
            modifiers=Modifiers.of(scale, causal, softcap, window_left, chunk, alibi_slopes, None, "exact"),
            tokens_before=before,
            tokens_after=after,
        )
        lens = self.lens
        needed = spans_of(max((lens[s] for s in sequences if s < len(lens)), default=0))
        spans = needed if spans is None else count("spans", spans, 1)
        if spans > MOST_SPANS:
            raise ParameterError(f"spans is {spans}; allowed: 1 to {MOST_SPANS}, those of the longest sequence")
        shape = (spans, sum(q_lens), rows.shape[-2], self.v_dim)
        stream = rows.stream()
        max_sums, o = rows.empty((*shape[:-1], 2), single=True), rows.empty(shape, single=True)
        self._cache.attend_spans(
            rows.contiguous().flat("q", 3).with_rows_together().capsule(stream),
            Rows("max_sums", max_sums, writable=True).capsule(stream),
            Rows("o", o, writable=True).capsule(stream),
            options,
            stream,
        )
        return max_sums, o

    def fork(self, source: int, target: int) -> None:
        """Makes `target`, an empty sequence, share the tokens of `source`. What is appended to either then is its own."""
        self._cache.fork(count("source", source), count("target", target))

    def truncate(self, sequence: int, tokens: int) -> None:
        """Keeps a sequence's first `tokens` and takes back the others, such as drafts that were rejected.

        Formats with a window (`"int4"`, `"int8/int4"`) can take back the tokens of the last append (up to `max_q_len`), all but the first 64 or fewer, and all behind a
        checkpoint (`checkpoints` of the cache); others any number.

        Raises:
            ShapeError for a length that the sequence cannot go back to, with the nearest earlier one that it can as its attribute `longest_prefix`; ParameterError for more
            tokens than there are; SequenceError.
        """
        self._cache.truncate(count("sequence", sequence), count("tokens", tokens))

    def longest_prefix(self, sequence: int, tokens: int) -> int:
        """The most tokens, `tokens` at most, that `truncate` can leave of a sequence: where to go on from to have its first `tokens` again.

        A radix tree forks the sequence and truncates the fork, so that both are there:

        >>> import numpy, attn
        >>> cache = attn.Cache("int4", heads=1, dim=64, max_tokens=1024, sequences=2, checkpoints=256, device="cpu")
        >>> rows = numpy.random.default_rng(1).normal(size=(1000, 1, 64)).astype("f")
        >>> cache.append(rows, rows)
        >>> prefix = cache.longest_prefix(0, 600)
        >>> cache.fork(0, 1)
        >>> cache.truncate(1, prefix)
        >>> cache.append(rows[prefix:600], rows[prefix:600], sequences=1)
        >>> prefix, cache.lens
        (512, [1000, 600])

        Raises:
            ParameterError for more tokens than there are; SequenceError; ShapeError for a sequence of an open step.
        """
        return self._cache.longest_prefix(count("sequence", sequence), count("tokens", tokens))

    def drop_before(self, sequence: int, token: int) -> None:
        """Frees the pages of tokens before `token`, which no window sees any more; lengths, positions and bits stay.

        After a step of a layer with a window, `token` is at most `len - window_left`. Pages go by whole tiles of 64 tokens: `first_tokens` says
        which are left. Queries whose window, or lack of one, sees a dropped token are refused, and so are `save` and `export`. In a cache of several
        layers a page goes in all of them.

        Raises:
            SequenceError; ParameterError for a token behind the sequence's end; ShapeError for a sequence of an open step.
        """
        self._cache.drop_before(count("sequence", sequence), count("token", token))

    def drop_range(self, sequence: int, start: int, end: int) -> int:
        """Drops tokens from the middle of a sequence and closes the gap, for streams that run for ever; returns how many.

        Whole pages and tiles of 64 tokens inside of `start` to `end` go; the first 64 tokens stay. `lens` counts the tokens that are left, and attention is that over
        them. Keys keep the rotary positions that they were appended with: go on with those of the stream. Windows and ALiBi count the tokens that are left.

        Raises:
            ParameterError for tokens of the first tile, and for the newest of formats with a window (`"int4"`, `"int8/int4"`), which queries read finely;
            SequenceError; ShapeError for a sequence of an open step, or one that `drop_before` has dropped tokens of.
        """
        return self._cache.drop_range(count("sequence", sequence), count("start", start), count("end", end))

    def shard_centres(self, sequence: int) -> bytes:
        """The centres of K of a sequence of 64 tokens or more, which `begin_shard` takes for its later shards; empty for a cache without.

        Raises:
            ParameterError for fewer tokens; SequenceError.
        """
        return bytes(self._cache.shard_centres(count("sequence", sequence)))

    def begin_shard(self, sequence: int, tokens_before: int, centres: bytes) -> None:
        """Makes an empty sequence a later shard, ahead of which `tokens_before` tokens lie in other caches: a multiple of 1024.

        Its keys have the centres of the sequence's first shard, `first.shard_centres(…)`, so that attention has the bits of one cache; `attend_spans` takes
        as many `tokens_before`. A cache without centres needs no such call. `free` ends the shard.

        Raises:
            ParameterError, ShapeError for centres of another cache; SequenceError.
        """
        if not isinstance(centres, (bytes, bytearray)):
            raise ParameterError(f"centres is a {type(centres).__name__}; needed: the bytes of `shard_centres`")
        self._cache.begin_shard(count("sequence", sequence), count("tokens_before", tokens_before), bytes(centres))

    def add_sequences(self, sequences: int) -> None:
        """Adds empty sequences behind the others, without pages."""
        self._cache.add_sequences(count("sequences", sequences))

    def add_pages(self, pages: int) -> None:
        """Adds free pages to the pools, on the CPU; other devices refuse and say so."""
        self._cache.add_pages(count("pages", pages))

    def free(self, sequence: int) -> None:
        """Empties a sequence and returns its pages."""
        self._cache.free(count("sequence", sequence))

    def pages_needed(self, sequences: Sequence[int], tokens: Sequence[int]) -> int:
        """Free pages that an append of so many tokens takes; it has room where `stats().free_pages` is at least that."""
        return self._cache.pages_needed(one_or_more("sequences", sequences), one_or_more("tokens", tokens))

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens takes at most, in an empty cache: what `pages=` is computed from."""
        return self._cache.pages_for(count("tokens", tokens))

    def export(self, sequence: int = 0, layer: Optional[int] = None) -> Tuple[Any, Any]:
        """K and V of a sequence as attention over a layer reads them, dequantized: two numpy arrays of float32, `[tokens, heads, dim]`.

        Formats with a window give the first 64 and the newest tokens with their residuals.
        """
        sequence = count("sequence", sequence)
        lens = self.lens
        tokens = lens[sequence] if sequence < len(lens) else 0
        k, v = (_numpy().empty((tokens, self.heads, dim), "float32") for dim in (self.dim, self.v_dim))
        self._cache.export(sequence, self._layer(layer), k.__dlpack__(), v.__dlpack__())
        return k, v

    def save(self, sequence: int = 0) -> SequenceImage:
        """A sequence's pages, to be restored into this or another cache of the same format and shape, on any device."""
        return SequenceImage(self._cache.save(count("sequence", sequence)))

    def restore(self, sequence: int, image: SequenceImage) -> None:
        """Fills an empty sequence with what `save` gave.

        Raises:
            SequenceError; ParameterError for a sequence that is not empty, and for numbers that the format cannot have; ShapeError for the image of a cache
            of another format, shape or other scales; CacheFullError.
        """
        if not isinstance(image, SequenceImage):
            raise ParameterError(f"image is a {type(image).__name__}; needed: what save gives, or attn.SequenceImage(data) of its bytes")
        self._cache.restore(count("sequence", sequence), image.data)

    def __copy__(self) -> "Cache":
        made = Cache.__new__(Cache)
        made._options, made._cache = self._options, self._cache.copy()
        return made

    def __deepcopy__(self, memo: Any) -> "Cache":
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise UnsupportedError("a cache cannot be pickled, since its pages lie in the memory of its device; save(sequence) gives what can be pickled, and restore takes it; in one process copy.deepcopy makes another cache")

    def __repr__(self) -> str:
        o = self._options
        return f"attn.Cache({o.format!r}, heads={o.heads}, dim={head_dim(o.dim, o.v_dim)}, sequences={self.sequences}, layers={o.layers}, device={self.device!r})"

