"""Merges of shards' results and states, and copies of pages: launches that belong to no plan."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from .. import _attn
from .._errors import ParameterError, ShapeError, UnsupportedError
from .._options import count, format_name
from .._spans import merge_spans as _merge_on_host
from ._tensors import float_type, floats, numbers_on
from ._plan import _arguments, _capsule

# Their kernels, by the GPU's index.
_TRANSFERS: Dict[int, Any] = {}
# Merges of spans, by the GPU's index, the format and the head's dims.
_MERGES: Dict[Tuple[int, str, int], Any] = {}


def merge(outs: torch.Tensor, lses: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Merges results over disjoint tokens of the same queries, such as the shards of a long context on several GPUs.

    Args:
        outs: `[shards, query tokens, heads, dim]`, on any device.
        lses: float32 `[shards, query tokens, heads]`; -inf where a shard has no token that the query sees. Sinks belong to one of the shards.

    Returns:
        The results, of `outs`' type, and their log-sum-exps. The same inputs give the same bits; they are not those of one device over all tokens.
    """
    outs, lses = floats("outs", outs), floats("lses", lses)
    if outs.dim() != 4 or lses.shape != outs.shape[:3]:
        raise ShapeError(f"outs has the shape {list(outs.shape)}, and lses {list(lses.shape)}; needed: [shards, query tokens, heads, dim] and its first three dims")
    return torch.ops.attn.merge(outs, lses)


def merge_spans(
    format: str,
    max_sums: torch.Tensor,
    o: torch.Tensor,
    *,
    kv_heads: int,
    dtype: Optional[torch.dtype] = None,
    sinks: Optional[torch.Tensor] = None,
    v_scales: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Merges what shards have left (`Plan.attend_spans`, `attn.Cache.attend_spans`), in the order of their tokens, and finishes: for integer formats the
    bits of one device over all tokens. On a GPU one launch, which a graph can capture once it has run outside; tensors of the CPU are merged there.

    Args:
        format: that of the cache.
        max_sums, o: float32 `[states, query tokens, heads, 2]` and `[states, query tokens, heads, dim]`, contiguous: shard after shard. Heads may be
            merged apart, each with the sinks and scales of its own.
        kv_heads: KV heads of these heads.
        dtype: that of the results, which are rounded once; float32 if not given.
        sinks: float32 `[heads]`, on the same device.
        v_scales: float32 `[kv_heads]` on the same device, which `"fp8"` and `"int8-tensor"` need, and no other format takes.

    Returns:
        The results `[query tokens, heads, dim]`, and float32 log-sum-exps `[query tokens, heads]`.

    Raises:
        ParameterError for scales that are missing; ShapeError, NumberError, UnsupportedError.
    """
    max_sums, o, dtype = floats("max_sums", max_sums), floats("o", o), float_type("dtype", dtype)
    if not o.is_cuda:
        out, lse = _merge_on_host(format, max_sums, o, kv_heads=kv_heads, sinks=sinks, v_scales=v_scales)
        return out.to(dtype), lse
    if not hasattr(_attn, "NativeMergeSpans"):
        raise UnsupportedError('this build of the package leaves CUDA out, which `pip install ./crates/attn-python` has; copy the states to the CPU')
    if o.dim() != 4 or max_sums.shape != (*o.shape[:3], 2):
        raise ShapeError(f"o has the shape {list(o.shape)}, and max_sums {list(max_sums.shape)}; needed: [states, query tokens, heads, dim] and [..., 2]")
    kv_heads, key = count("kv_heads", kv_heads, 1), (o.device.index, format_name(format), o.shape[3])
    sinks, v_scales = numbers_on("sinks", sinks, o.device), numbers_on("v_scales", v_scales, o.device)
    with torch.cuda.device(o.device):
        if key not in _MERGES:
            _MERGES[key] = _attn.NativeMergeSpans(key[1], o.shape[3], f"cuda:{o.device.index}")
        out = torch.empty(o.shape[1:], dtype=dtype, device=o.device)
        lse = torch.empty(o.shape[1:3], dtype=torch.float32, device=o.device)
        arrays = _arguments(max_sums=max_sums, o=o, out=out, lse=lse, sinks=sinks, v_scales=v_scales, kv_heads=kv_heads)
        _MERGES[key].merge(arrays, torch.cuda.current_stream().cuda_stream)
    return out, lse


def _transfer(device: torch.device) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _TRANSFERS:
        _TRANSFERS[index] = _attn.NativeTransfer(f"cuda:{index}")
    return _TRANSFERS[index]


@torch.library.custom_op("attn::merge", mutates_args=())
def _merge(outs: torch.Tensor, lses: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    lses = lses.float().contiguous()
    if outs.is_cuda and outs.size(3) % 4 == 0 and 0 < outs.size(3) <= 576 and hasattr(_attn, "NativeTransfer"):
        out, lse = torch.empty_like(outs[0], memory_format=torch.contiguous_format), torch.empty_like(lses[0])
        with torch.cuda.device(outs.device):
            arrays = _arguments(outs=outs.contiguous().flatten(1, 2), lses=lses, out=out.flatten(0, 1), lse=lse)
            _transfer(outs.device).merge(arrays, torch.cuda.current_stream().cuda_stream)
        return out, lse
    lse = torch.logsumexp(lses, 0)
    # A query that sees no token anywhere has weights 0, not NaN.
    weights = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))
    out = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for shard, weight in zip(outs, weights):
        out += weight[..., None] * shard.float()
    return out.to(outs.dtype), lse


@_merge.register_fake
def _(outs, lses):
    return torch.empty_like(outs[0]), torch.empty_like(lses[0], dtype=torch.float32)


@torch.library.custom_op("attn::copy_pages", mutates_args=("target",))
def copy_pages(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies pages as they are, with their scales: inside a pool, between pools, or between a pool and pinned host memory (swap). One launch.

    Args:
        source, target: uint8 `[pages, page_bytes]`, on the GPU or pinned (`pin_memory=True`); pages may lie apart.
        pairs: int64 `[pairs, 2]` on the GPU: the page to read and the page to write; a pair with one below 0, or beyond its pool, is skipped. No page
            is written that another pair reads or writes.
    """
    for name, pool in (("source", source), ("target", target)):
        if not (pool.is_cuda or pool.is_pinned()):
            raise ParameterError(f"{name} is host memory that is not pinned; allocate it with pin_memory=True")
    if not pairs.is_cuda:
        raise ParameterError("pairs lie on the host; allowed: int64 on the GPU")
    with torch.cuda.device(pairs.device):
        _transfer(pairs.device).copy_pages(*map(_capsule, (source, target, pairs)), torch.cuda.current_stream().cuda_stream)
