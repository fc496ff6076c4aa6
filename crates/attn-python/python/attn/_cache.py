"""`attn.Cache`: a paged, quantized KV cache and attention over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple, Union

from . import _attn
from ._arrays import Rows, _numpy
from ._errors import ParameterError, ShapeError
from ._options import Modifiers, count, numbers


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds: pages, bytes and tokens."""

    pages: int
    """Pages of the pool."""
    free_pages: int
    """Pages that no sequence owns."""
    page_bytes: int
    """Bytes of a page: K, V and their scales, of all heads."""
    tokens: int
    """Tokens of all sequences; those of a shared prefix count for each."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences own."""
        return (self.pages - self.free_pages) * self.page_bytes


@dataclass(frozen=True)
class SequenceImage:
    """A sequence outside its cache, for `Cache.restore`: its format and shape, and its pages as bytes."""

    format: str
    heads: int
    dim: int
    page_size: int
    tokens: int
    k_scales: Optional[Tuple[float, ...]]
    v_scales: Optional[Tuple[float, ...]]
    pages: Tuple[bytes, ...]


@dataclass(frozen=True)
class _CacheOptions:
    format: str
    heads: int
    dim: int
    max_tokens: int
    sequences: int
    pages: Optional[int]
    page_size: int
    max_q_len: int
    k_scales: Optional[List[float]]
    v_scales: Optional[List[float]]


@dataclass(frozen=True)
class _StepOptions:
    sequences: List[int]
    q_lens: List[int]
    modifiers: Modifiers


class Cache:
    """A paged, quantized KV cache of one attention layer, for several sequences, and attention over it.

    Rows are numpy arrays, torch tensors (CPU and CUDA), or anything with `__dlpack__`, in float32, float16 or bfloat16. On the CPU they are read in
    place wherever their last dim is contiguous and none runs backwards, such as parts of a fused projection and transposed arrays; nothing may write
    between them meanwhile. Results come as what the queries are. Attention over integer formats gives the same bits on every device, for any batch, and whether a token is decoded alone,
    verified among drafts, or part of a prompt.

    Args:
        format: `"int8"`, `"int4"`, `"int8/int4"` (K/V), `"bf16"`, `"f16"`, `"fp8"`, or another name of the table of formats.
        heads: KV heads.
        dim: dims of a head: 64, 80, 96, 128, 192 or 256.
        max_tokens: tokens that each sequence has room for.
        sequences: sequences, numbered from 0, all empty.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, `"wgpu"`; None: what `ATTN_BACKEND` names, else the best here.
        pages: pages of the pool, in place of enough for `max_tokens` of every sequence.
        page_size: tokens of a page: 16, 32, 64 or 128.
        max_q_len: most query tokens of a sequence in a step, for formats with a window (`"int4"`, `"int8/int4"`); others take any number.
        k_scales, v_scales: static scales, one for each head, for `"fp8"` and `"int8-tensor"`.

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
        sequences: int = 1,
        device: Optional[str] = None,
        pages: Optional[int] = None,
        page_size: int = 64,
        max_q_len: int = 64,
        k_scales: Optional[Sequence[float]] = None,
        v_scales: Optional[Sequence[float]] = None,
    ) -> None:
        if not isinstance(format, str):
            raise ParameterError(f"format is {format!r}; allowed: a name such as \"int8\"")
        if device is not None:
            # torch.device says what it is.
            device = str(device)
        self._options = _CacheOptions(
            format=format,
            heads=count("heads", heads, 1),
            dim=count("dim", dim, 1),
            max_tokens=count("max_tokens", max_tokens),
            sequences=count("sequences", sequences),
            pages=None if pages is None else count("pages", pages),
            page_size=count("page_size", page_size, 1),
            max_q_len=count("max_q_len", max_q_len),
            k_scales=numbers("k_scales", k_scales),
            v_scales=numbers("v_scales", v_scales),
        )
        self._cache = _attn.Cache(self._options, device)

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
        """Dims of a head."""
        return self._options.dim

    @property
    def sequences(self) -> int:
        """Sequences, empty ones included."""
        return self._options.sequences

    @property
    def device(self) -> str:
        """Where the pages lie: `"cpu"`, `"cuda:0"`, `"wgpu"`."""
        return self._cache.device

    @property
    def lens(self) -> List[int]:
        """Cached tokens of each sequence."""
        return self._cache.lens()

    def stats(self) -> CacheStats:
        """Pages, bytes and tokens."""
        return CacheStats(self._cache.num_pages, self._cache.free_pages(), self._cache.page_bytes, sum(self.lens))

    def _batch(self, what: str, rows: Rows, sequences: Any, counts: Any) -> Tuple[List[int], List[int]]:
        """The sequences of a call and their tokens; rows are `[tokens, heads, dim]` or `[sequences, tokens, heads, dim]`."""
        if len(rows.shape) not in (3, 4):
            raise ShapeError(f"{what} has the shape {list(rows.shape)}; needed: [tokens, heads, dim] or [sequences, tokens, heads, dim]")
        is_batch = len(rows.shape) == 4
        if sequences is None:
            sequences = range(rows.shape[0]) if is_batch else range(1 if counts is None else len(counts))
        elif hasattr(sequences, "__index__"):
            sequences = [sequences]
        sequences = [count("sequences", s) for s in sequences]
        if is_batch:
            if len(sequences) != rows.shape[0]:
                raise ShapeError(f"{what} has rows for {rows.shape[0]} sequences, but sequences names {len(sequences)}")
            if counts is not None:
                raise ParameterError(f"{what} of four dims has as many tokens for each sequence; pass three dims for other counts")
            return sequences, [rows.shape[1]] * rows.shape[0]
        if counts is None:
            if len(sequences) != 1:
                raise ParameterError(f"{what} has {rows.shape[0]} tokens for {len(sequences)} sequences; say how many each gets")
            return sequences, [rows.shape[0]]
        return sequences, [count("tokens of a sequence", n) for n in counts]

    def append(
        self,
        k: Any,
        v: Any,
        *,
        sequences: Union[None, int, Sequence[int]] = None,
        tokens: Optional[Sequence[int]] = None,
    ) -> None:
        """Appends tokens to sequences: to all of them, or to none if anything is refused.

        Args:
            k, v: `[tokens, heads, dim]`, the tokens of one sequence after those of another; or `[sequences, tokens, heads, dim]`. K is what queries
                are multiplied with: after the positions are rotated in.
            sequences: which get them, each once; the first ones if not given.
            tokens: how many each gets, where `k` has three dims and there are several sequences.

        Raises:
            ShapeError, SequenceError, CacheFullError, ParameterError; NumberError for NaN and infinity in host memory (numbers on a GPU are not
            looked at, unless `ATTN_CHECK=1` is set).
        """
        k, v = Rows("k", k), Rows("v", v)
        sequences, tokens = self._batch("k", k, sequences, tokens)
        if k.shape != v.shape:
            raise ShapeError(f"k has the shape {list(k.shape)}, and v {list(v.shape)}; pass both in one")
        stream = k.stream()
        k, v = (rows.flat(what, 3).with_rows_together() for what, rows in (("k", k), ("v", v)))
        self._cache.append(k.capsule(stream), v.capsule(stream), sequences, tokens, stream)

    def attend(
        self,
        q: Any,
        *,
        sequences: Union[None, int, Sequence[int]] = None,
        q_lens: Optional[Sequence[int]] = None,
        scale: Optional[float] = None,
        causal: bool = True,
        softcap: Optional[float] = None,
        window_left: Optional[int] = None,
        alibi_slopes: Optional[Sequence[float]] = None,
        sinks: Optional[Sequence[float]] = None,
        out: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attends over cached tokens. The tokens of a step are appended first; the last query token stands at a sequence's last cached token.

        Args:
            q: `[query tokens, query heads, dim]`, sequence after sequence; or `[sequences, query tokens, query heads, dim]`. Query heads are a
                multiple of the KV heads.
            sequences: which are attended, in any order; the first ones if not given.
            q_lens: query tokens of each, where `q` has three dims and there are several sequences.
            scale: the factor of q·k; 1/√dim if not given.
            causal: whether query token i sees only the tokens up to its own position.
            softcap: scores become `softcap · tanh(score / softcap)`.
            window_left: tokens before its own position that a token sees; transformers' `sliding_window` is one more.
            alibi_slopes, sinks: a number for each query head.
            out: where the results go, of q's shape and type; on the CPU at any strides with a contiguous last dim and rows that do not overlap, on a
                GPU contiguous. It may lie between the queries, or be them, on the CPU.
            return_lse: whether the logarithms of the softmax's sums are returned, too.

        Returns:
            The results, of q's shape, type and library; with `return_lse` also the log-sum-exps, float32, of q's shape without its last dim.

        Raises:
            ShapeError, SequenceError, ParameterError, UnsupportedError, DeviceError; NumberError for NaN and infinity in host memory.
        """
        rows = Rows("q", q)
        sequences, q_lens = self._batch("q", rows, sequences, q_lens)
        options = _StepOptions(
            sequences=sequences,
            q_lens=q_lens,
            modifiers=Modifiers.of(scale, causal, softcap, window_left, alibi_slopes, sinks),
        )
        if out is None:
            out = rows.empty(rows.shape)
        lse = rows.empty(rows.shape[:-1], single=True) if return_lse else None
        outputs = Rows("out", out, writable=True)
        if outputs.shape != rows.shape:
            raise ShapeError(f"out has the shape {list(outputs.shape)}; needed: that of q, {list(rows.shape)}")
        stream = rows.stream()
        self._cache.attend(
            rows.contiguous().flat("q", 3).with_rows_together().capsule(stream),
            outputs.flat("out", 3).capsule(stream),
            None if lse is None else Rows("lse", lse, writable=True).flat("lse", 2).capsule(stream),
            options,
            stream,
        )
        return out if lse is None else (out, lse)

    def fork(self, source: int, target: int) -> None:
        """Makes `target`, an empty sequence, share the tokens of `source`. What is appended to either then is its own."""
        self._cache.fork(count("source", source), count("target", target))

    def truncate(self, sequence: int, tokens: int) -> None:
        """Keeps a sequence's first `tokens` and takes back the others, such as drafts that were rejected.

        Formats with a window (`"int4"`, `"int8/int4"`) can take back the tokens of the last append (up to `max_q_len`); others any number.
        """
        self._cache.truncate(count("sequence", sequence), count("tokens", tokens))

    def free(self, sequence: int) -> None:
        """Empties a sequence and returns its pages."""
        self._cache.free(count("sequence", sequence))

    def pages_needed(self, sequences: Sequence[int], tokens: Sequence[int]) -> int:
        """Free pages that an append of so many tokens takes; it has room where `stats().free_pages` is at least that."""
        return self._cache.pages_needed([count("sequences", s) for s in sequences], [count("tokens", n) for n in tokens])

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens takes at most, in an empty cache: what `pages=` is computed from."""
        return self._cache.pages_for(count("tokens", tokens))

    def export(self, sequence: int = 0) -> Tuple[Any, Any]:
        """K and V of a sequence as attention reads them, dequantized: two numpy arrays of float32, `[tokens, heads, dim]`.

        Formats with a window give the newest tokens with their residuals.
        """
        sequence = count("sequence", sequence)
        lens = self.lens
        tokens = lens[sequence] if sequence < len(lens) else 0
        shape = (tokens, self.heads, self.dim)
        k, v = (_numpy().empty(shape, "float32") for _ in range(2))
        self._cache.export(sequence, k.__dlpack__(), v.__dlpack__())
        return k, v

    def save(self, sequence: int = 0) -> SequenceImage:
        """A sequence's pages, to be restored into this or another cache of the same format and shape, on any device."""
        tokens, pages = self._cache.read_back(count("sequence", sequence))
        o = self._options
        scales = (None if s is None else tuple(s) for s in (o.k_scales, o.v_scales))
        return SequenceImage(o.format, o.heads, o.dim, o.page_size, tokens, *scales, tuple(pages))

    def restore(self, sequence: int, image: SequenceImage) -> None:
        """Fills an empty sequence with what `save` gave."""
        o = self._options
        for what in ("format", "heads", "dim", "page_size"):
            own, other = getattr(o, what), getattr(image, what)
            if own != other:
                raise ShapeError(f"{what} is {other!r} in the image but {own!r} in the cache; restore it into a cache of its own kind")
        for what in ("k_scales", "v_scales"):
            own, other = getattr(o, what), getattr(image, what)
            if (own and list(own)) != (other and list(other)):
                raise ShapeError(f"{what} differ between the image and the cache; restore it into a cache of its own kind")
        self._cache.restore(count("sequence", sequence), image.tokens, list(image.pages))

    def __repr__(self) -> str:
        o = self._options
        return f"attn.Cache({o.format!r}, heads={o.heads}, dim={o.dim}, sequences={o.sequences}, device={self.device!r})"

