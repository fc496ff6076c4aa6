"""States of spans: what shards of a sequence leave, and their merge in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

from . import _attn
from ._arrays import Rows
from ._errors import ParameterError, ShapeError
from ._options import count, format_name, numbers

SPAN = 1024
"""Tokens of a span, which the arithmetic merges as a whole: shards begin at multiples of it."""

TILE = 64
"""Tokens of a tile: the keys of a sequence's first one make its centres of K."""


MOST_SPANS = 1024
"""Spans of the longest sequence, of 2^20 tokens."""


def spans_of(tokens: int) -> int:
    """States that a shard of so many tokens leaves of each row: one for each span, and one at least."""
    return max(1, -(-tokens // SPAN))


def tokens_of_rank(tokens: int, ranks: int) -> int:
    """Tokens of each rank but the last, where a context of so many is shared evenly: whole spans."""
    tokens, ranks = count("tokens", tokens), count("ranks", ranks, 1)
    return -(-tokens // (SPAN * ranks)) * SPAN


@dataclass(frozen=True)
class _HostMerge:
    max_sums: Any
    o: Any
    out: Any
    lse: Any
    sinks: Optional[List[float]]
    v_scales: Optional[List[float]]
    kv_heads: int


def merge_spans(
    format: str,
    max_sums: Any,
    o: Any,
    *,
    kv_heads: int,
    sinks: Optional[Sequence[float]] = None,
    v_scales: Optional[Sequence[float]] = None,
) -> Tuple[Any, Any]:
    """Merges what shards have left (`Cache.attend_spans`), in the order of their tokens, and finishes: for integer formats the bits of one device over
    all tokens. In host memory; `attn.torch.merge_spans` takes tensors of GPUs, too.

    Args:
        format: that of the cache.
        max_sums, o: `[states, query tokens, heads, 2]` and `[states, query tokens, heads, dim]`, shard after shard. Heads may be merged apart, each with
            the sinks and scales of its own.
        kv_heads: KV heads of these heads.
        sinks: a number for each head.
        v_scales: static scales of the KV heads, which `"fp8"` and `"int8-tensor"` need, and no other format takes.

    Returns:
        The results `[query tokens, heads, dim]`, and log-sum-exps `[query tokens, heads]`, float32, of o's library.

    Raises:
        ShapeError; ParameterError, for scales that are missing, too; NumberError for numbers that no state has.

    >>> import numpy, attn
    >>> first, last = (attn.Cache(heads=1, dim=64, max_tokens=1024, device="cpu") for _ in range(2))
    >>> rows, q = numpy.ones((1500, 1, 64), "f"), numpy.ones((1, 4, 64), "f")
    >>> first.append(rows[:1024], rows[:1024])
    >>> last.begin_shard(0, 1024, first.shard_centres(0))
    >>> last.append(rows[1024:], rows[1024:])
    >>> states = first.attend_spans(q, tokens_after=[476]), last.attend_spans(q, tokens_before=[1024])
    >>> out, lse = attn.merge_spans("int8", *(numpy.concatenate(x) for x in zip(*states)), kv_heads=1)
    >>> whole = attn.Cache(heads=1, dim=64, max_tokens=1500, device="cpu")
    >>> whole.append(rows, rows)
    >>> bool((out == whole.attend(q)).all())
    True
    """
    max_sums, o = Rows("max_sums", max_sums), Rows("o", o)
    if max_sums.on_cuda or o.on_cuda:
        raise ParameterError("max_sums and o lie on a GPU; attn.torch.merge_spans merges them there")
    if len(o.shape) != 4 or max_sums.shape != (*o.shape[:3], 2):
        raise ShapeError(f"o has the shape {list(o.shape)}, and max_sums {list(max_sums.shape)}; needed: [states, query tokens, heads, dim] and [..., 2]")
    out, lse = (o.empty(shape, single=True) for shape in (o.shape[1:], o.shape[1:3]))
    arrays = _HostMerge(
        max_sums=max_sums.capsule(None),
        o=o.capsule(None),
        out=Rows("out", out, writable=True).capsule(None),
        lse=Rows("lse", lse, writable=True).capsule(None),
        sinks=numbers("sinks", sinks),
        v_scales=numbers("v_scales", v_scales),
        kv_heads=count("kv_heads", kv_heads, 1),
    )
    _attn.merge_spans(format_name(format), arrays)
    return out, lse
