"""Pages in host memory that the caller owns, such as an engine's pool of blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional, Sequence

from . import _attn
from ._arrays import Results, Rows
from ._options import Modifiers, check_values, count, counts, flag, format_name, optional_count, refusal


class HostPages:
    """Appends to pages in host memory by slots, and attends over them through the caller's page table: what `attn.torch.Plan` does on a GPU, on the CPU.

    A pool is uint8, whole pages side by side, of any shape; its bytes are those of a cache's pages, and of a GPU's. Nothing is kept between calls.

    With `centres`, results have the bits of a cache with centres of K: behind the K and V of a sequence's first page lie its centres, bfloat16 `[KV heads, 2, dim]`. Other pages have room for some, which is not looked at;
    what copies a page copies its centres, too.

    Args:
        format: what pages hold: a format without a window and without static scales, such as `"int8"`, `"int8/int4-w0"`, `"int4-g1"`, `"bf16"`.
        kv_heads, dim: KV heads, dims of a head.
        v_dim: dims of a value and of a result, where they are not those of a key and a query.
        page_size: tokens of a page: 16, 32, 64 or 128; with centres 64 or 128.
        centres: pages have centres of K, for formats whose K is rotated int8 and whose V is of integers: `"int8"`, `"int8/int4-w0"`, `"int8/int8-plain"`.
        page_stride: bytes from where a page of the pool begins to where the next one does: `page_bytes`, which it is if not given, or a larger multiple of 16.

    Raises:
        ParameterError, UnsupportedError.
    """

    def __init__(
        self,
        format: str = "int8",
        *,
        kv_heads: int,
        dim: int,
        v_dim: Optional[int] = None,
        page_size: int = 64,
        centres: bool = False,
        page_stride: Optional[int] = None,
    ) -> None:
        self._format = format_name(format)
        self._v_dim = count("v_dim", dim if v_dim is None else v_dim, 1)
        head_dim = (count("dim", dim, 1), self._v_dim)
        self._centres, stride = flag("centres", centres), optional_count("page_stride", page_stride, 1)
        self._pages = _attn.HostPages(self._format, count("kv_heads", kv_heads, 1), head_dim, count("page_size", page_size, 1), self._centres, stride)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: K, V and their scales, of all KV heads, and room for a sequence's centres in pages that have some."""
        return self._pages.page_bytes

    @property
    def page_stride(self) -> int:
        """Bytes from where a page of the pool begins to where the next one does."""
        return self._pages.page_stride

    def append_slots(self, k: Any, v: Optional[Any], pool: Any, slots: Any, first_pages: Any = None, positions: Any = None) -> None:
        """Appends tokens that bring their places: any number, of any sequences. A call that is refused changes nothing.

        Args:
            k, v: `[tokens, KV heads, dim]`, of V v_dim, float32, float16 or bfloat16; tokens may lie apart. Of latents v is None.
            slots: int64 `[tokens]`, page · page_size + token of the page; negative: skipped, whatever the token holds. Of tokens with the same slot, the last one stays.
            first_pages: of pages with centres, int32 `[tokens]`: the page that holds the first tokens of the token's sequence.
            positions: of pages with centres, int32 `[tokens]`: the token's number in its sequence. Token 0 makes the sequence's first centre; a call with token 63 makes the second one,
                of what the first page stores of tokens 0 to 63, those of the call included.

        Raises:
            ShapeError, ParameterError; NumberError for NaN, infinity and numbers that the format does not take.
        """
        check_values(self._format, v)
        centres = None
        for what, x in (("first_pages", first_pages), ("positions", positions)):
            if (x is not None) != self._centres:
                raise refusal(what, x, "an array, one entry a token, where pages have centres, and None where they have none")
        if self._centres:
            centres = (Rows("first_pages", first_pages).capsule(None), Rows("positions", positions).capsule(None))
        self._pages.append_slots(
            Rows("k", k).capsule(None),
            None if v is None else Rows("v", v).capsule(None),
            Rows("pool", pool, writable=True).capsule(None),
            Rows("slots", slots).capsule(None),
            centres,
        )

    def attend(
        self,
        q: Any,
        pool: Any,
        page_table: Any,
        kv_lens: Sequence[int],
        *,
        q_lens: Optional[Sequence[int]] = None,
        scale: Optional[float] = None,
        causal: bool = True,
        softcap: Optional[float] = None,
        window_left: Optional[int] = None,
        chunk: Optional[int] = None,
        alibi_slopes: Optional[Sequence[float]] = None,
        sinks: Optional[Sequence[float]] = None,
        out: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attends; the last query token of a sequence stands at its last cached token.

        Args:
            q: `[query tokens, query heads, dim]`, sequence after sequence.
            page_table: int32 `[sequences, pages]`; entries behind a sequence's last token, and rows behind the last sequence's, are not looked at.
            kv_lens: cached tokens of each sequence, those of the step included.
            q_lens: query tokens of each; one each if not given.
            scale, causal, softcap, window_left, chunk, alibi_slopes, sinks, out, return_lse: as for `attn.Cache.attend`.

        Returns:
            The results, of q's type and library, and of its shape with v_dim as the last dim; with `return_lse` also the log-sum-exps, float32 `[query tokens, query heads]`.

        Raises:
            ShapeError, ParameterError, UnsupportedError; NumberError for NaN and infinity in q.
        """
        rows, lens = Rows("q", q), counts("kv_lens", kv_lens)
        step = SimpleNamespace(
            kv_lens=lens,
            q_lens=[1] * len(lens) if q_lens is None else counts("q_lens", q_lens),
            modifiers=Modifiers.of(scale, causal, softcap, window_left, chunk, alibi_slopes, sinks, "exact"),
        )
        results = Results(rows, self._v_dim, out, flag("return_lse", return_lse))
        arrays = SimpleNamespace(
            q=rows.capsule(None),
            out=results.out.capsule(None),
            lse=None if results.lse is None else results.lse.capsule(None),
            pool=Rows("pool", pool).capsule(None),
            page_table=Rows("page_table", page_table).capsule(None),
        )
        self._pages.attend(arrays, step)
        return results.arrays()
