"""Llama 2 70B's shape, the bytes that a decode step of it reads on each GPU, and a prediction of its milliseconds. `llama70b_step.py --predict` prints it.

A step is a sum, for a GPU of n that share heads, or tokens of the cache:

    products    the weights' share read once, or as many fp8 products as the batch has rows, whichever takes longer
    attention   the cache's share read once, at the rate of its format
    small       the kernels of norms, positions, rounding and sums, which no GPU has fewer of; and their bytes for each row, of which the part with the
                hidden size is computed whole by every GPU
    exchange    two all-reduces a layer, a row of the hidden size each; with tokens sharded also the gather of q, k and v, the exchange of states, and
                the kernels that put both together

Constants of one H200 come from its measured steps (docs/data/llama70b-h200.json), which the sum meets within 6 %; those between GPUs from steps of two and
four H200s (llama70b-2-h200.json, -4-, -tokens-), which it meets within 9 %. Eight have not been measured: a run of them tests it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Dict, List

import attn
from attn._spans import SPAN, tokens_of_rank


@dataclass
class Shape:
    """A model's sizes."""

    hidden: int = 8192
    layers: int = 80
    heads: int = 64
    kv_heads: int = 8
    dim: int = 128
    feed: int = 28672
    vocabulary: int = 32000

    @property
    def qkv(self) -> int:
        """Elements of a token's q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def weights(self) -> int:
        """Weights of all layers, a byte each in fp8."""
        own = self.qkv + self.heads * self.dim + 3 * self.feed
        return self.layers * self.hidden * own


# What a step computes with beside weights and cache takes up to 2 GB at these batches.
STEP_BYTES = 2e9


@dataclass(frozen=True)
class Machine:
    """One GPU, and what joins it to the others."""

    name: str = "H200"
    memory: float = 149e9
    """Bytes that a process can have."""
    weights_per_second: float = 4.69e12
    """Bytes of weights read by cuBLAS: the ceiling of a plain read of 1 GiB."""
    products_per_second: float = 1.35e15
    """fp8 operations of cuBLAS through torch, two for each product."""
    least_rows: int = 16
    """Rows that an fp8 product is padded to."""
    small_seconds: Dict[str, float] = field(default_factory=lambda: {"bf16": 9.0e-3, "int8": 9.2e-3, "int4": 9.7e-3})
    """Small kernels of 80 layers at one row, appends of each format among them, and the start of each product and attention."""
    row_seconds: float = 46e-6
    """The same for each further row."""
    row_share_whole: float = 0.3
    """The part of that which every GPU computes whole, by bytes: what has the hidden size, not the heads' or the feed-forward's."""
    collective_seconds: float = 9.7e-6
    """Start of an all-reduce of NCCL inside a graph."""
    link_per_second: float = 417e9
    """Bytes that a GPU sends in all-reduces, over NVLink of 450 GB/s each way."""
    shard_seconds: float = 60e-6
    """A layer's gather of q, k and v and exchange of states where tokens are sharded, and the small kernels beside them."""
    shard_per_second: float = 170e9
    """Bytes that a GPU sends in these, the copies that put them together among them."""
    cache_per_second: Dict[str, float] = field(default_factory=lambda: {"bf16": 4.4e12, "int8": 4.2e12, "int4": 3.4e12})
    """Bytes of each format's cache that attention reads."""


@dataclass(frozen=True)
class Predicted:
    """A step on each of so many GPUs: its seconds by part, and bytes."""

    products: float
    attention: float
    small: float
    exchange: float
    weights_bytes: int
    cache_bytes: int
    fits: bool

    @property
    def ms(self) -> float:
        return 1e3 * (self.products + self.attention + self.small + self.exchange)


def cache_bytes(shape: Shape, layers: int, format: str, batch: int, kv_heads: int, tokens: int) -> int:
    """Bytes of a cache of so many KV heads and tokens of each sequence, before it is allocated."""
    one = attn.Cache(format, heads=kv_heads, dim=shape.dim, max_tokens=0, pages=0, max_q_len=1, device="cpu")
    return layers * batch * one.pages_for(tokens) * one.stats().page_bytes


def predicted(shape: Shape, format: str, batch: int, context: int, gpus: int, by_tokens: bool = False, machine: Machine = Machine()) -> Predicted:
    """A step on `gpus` GPUs that share heads, or with `by_tokens` the cache's tokens."""
    if format not in machine.cache_per_second:
        raise SystemExit(f"no step with {format} has been measured; formats to predict: {', '.join(machine.cache_per_second)}")
    weights = shape.weights // gpus
    kv_heads, tokens = (shape.kv_heads, tokens_of_rank(context, gpus)) if by_tokens and gpus > 1 else (shape.kv_heads // gpus, context)
    cache = cache_bytes(shape, shape.layers, format, batch, kv_heads, tokens)
    products = 2 * weights * max(batch, machine.least_rows) / machine.products_per_second
    rows = batch * machine.row_seconds * (machine.row_share_whole + (1 - machine.row_share_whole) / gpus)
    # What a GPU sends: of an all-reduce its share twice to all others; of a gather its own part to each; of an exchange its own but for what stays.
    others = (gpus - 1) / gpus
    exchange = 2 * (machine.collective_seconds + 2 * others * 2 * batch * shape.hidden / machine.link_per_second)
    if by_tokens:
        states = -(-tokens // SPAN) * batch * shape.heads * 4 * (shape.dim + 2)
        exchange += machine.shard_seconds + others * (2 * batch * shape.qkv + states) / machine.shard_per_second
    return Predicted(
        products=max(weights / machine.weights_per_second, products),
        attention=cache / machine.cache_per_second[format],
        small=machine.small_seconds[format] + rows,
        exchange=shape.layers * exchange if gpus > 1 else 0.0,
        weights_bytes=weights,
        cache_bytes=cache,
        fits=weights + cache + STEP_BYTES <= machine.memory,
    )


def predictions(shape: Shape, formats: List[str], batches: List[int], contexts: List[int], by_tokens: bool = False) -> List[Dict]:
    """A row for each step on 1, 2, 4 and 8 GPUs, with the keys of `llama70b_step.py --json`; ms is None where weights and cache do not fit."""
    rows = []
    for context in contexts:
        for batch in batches:
            for format in formats:
                for gpus in (1, 2, 4, 8):
                    step = predicted(shape, format, batch, context, gpus, by_tokens)
                    row = dict(format=format, batch=batch, context=context, gpus=gpus, by="tokens" if by_tokens else "heads")
                    row.update(weights_gb=round(step.weights_bytes / 1e9, 2), cache_gb=round(step.cache_bytes / 1e9, 2), ms=round(step.ms, 1) if step.fits else None)
                    row.update({f"{part}_ms": round(1e3 * asdict(step)[part], 2) for part in ("products", "attention", "small", "exchange")})
                    rows.append(row)
    return rows
