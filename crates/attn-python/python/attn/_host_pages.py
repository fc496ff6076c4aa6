"""Pages in host memory that the caller owns, such as an engine's pool of blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional, Sequence

from . import _attn
from ._arrays import Results, Rows
from ._options import Modifiers, count, counts, flag, format_name


class HostPages:
    """Appends to pages in host memory by slots, and attends over them through the caller's page table: what `attn.torch.Plan` does on a GPU, on the CPU.

    A pool is uint8, whole pages side by side, of any shape; its bytes are those of a cache's pages, and of a GPU's. Nothing is kept between calls.

    Args:
        format: what pages hold: a format without a window and without static scales, such as `"int8"`, `"int8/int4-w0"`, `"int4-g1"`, `"bf16"`.
        kv_heads, dim: KV heads, dims of a head.
        v_dim: dims of a value and of a result, where they are not those of a key and a query.
        page_size: tokens of a page: 16, 32, 64 or 128.

    Raises:
        ParameterError, UnsupportedError.
    """

    def __init__(self, format: str = "int8", *, kv_heads: int, dim: int, v_dim: Optional[int] = None, page_size: int = 64) -> None:
        self._v_dim = count("v_dim", dim if v_dim is None else v_dim, 1)
        head_dim = (count("dim", dim, 1), self._v_dim)
        self._pages = _attn.HostPages(format_name(format), count("kv_heads", kv_heads, 1), head_dim, count("page_size", page_size, 1))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: K, V and their scales, of all KV heads."""
        return self._pages.page_bytes

    def append_slots(self, k: Any, v: Any, pool: Any, slots: Any) -> None:
        """Appends tokens that bring their places: any number, of any sequences. A call that is refused changes nothing.

        Args:
            k, v: `[tokens, KV heads, dim]`, of V v_dim, float32, float16 or bfloat16; tokens may lie apart.
            slots: int64 `[tokens]`, page · page_size + token of the page; negative: skipped, whatever the token holds. Of tokens with the same slot, the last one stays.

        Raises:
            ShapeError, ParameterError; NumberError for NaN, infinity and numbers that the format does not take.
        """
        self._pages.append_slots(
            Rows("k", k).capsule(None),
            Rows("v", v).capsule(None),
            Rows("pool", pool, writable=True).capsule(None),
            Rows("slots", slots).capsule(None),
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
            page_table: int32 `[sequences, pages]`; entries behind a sequence's last token are not looked at.
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
