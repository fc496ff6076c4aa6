"""Whether a layer's keys have outlier channels, which a format stores badly: looked at on their device, and told when the answer has come."""

from __future__ import annotations

import logging
from collections import deque
from itertools import accumulate
from typing import Any, Deque, Sequence, Tuple

import torch

# Keys are looked at in a layer's first prompt of `LOOKED_AT` tokens and in those behind `NEXT_LOOK` times as many as before, since slow biases show late; they are stored badly from
# `MOST_UNEVEN` on. attn-core/src/cache/outliers.rs says why.
LOOKED_AT, NEXT_LOOK, MOST_UNEVEN = 64, 8, 10.0
_LOG = logging.getLogger(__name__)

# Answers under way: what says that one has come, the answer, the layer and its cache's type.
_UNDER_WAY: Deque[Tuple[Any, torch.Tensor, str, str]] = deque()


def unevenness(keys: torch.Tensor) -> torch.Tensor:
    """The mean square of all channels of keys `[tokens, KV heads, head_size]` over that of the middle channel, in the head where it is largest."""
    squares = keys.float().square().mean(0)
    return (squares.mean(-1) / squares.median(-1).values).nan_to_num(nan=1.0).max()


class KeyLook:
    """The looks at one layer's keys."""

    def __init__(self, kv_cache_dtype: str) -> None:
        self.kv_cache_dtype = kv_cache_dtype
        # Tokens of a sequence at the next look.
        self.next_at = LOOKED_AT

    def look(self, layer: Any, keys: torch.Tensor, q_lens: Sequence[int], max_kv_len: int) -> None:
        """Looks at a batch's new keys `[tokens, KV heads, head_size]` where that is due; the host does not wait for the device. Warns of what earlier looks have found."""
        tell()
        if max_kv_len < self.next_at:
            return
        ends = [end for end, q_len in zip(accumulate(q_lens), q_lens) if q_len >= LOOKED_AT]
        if not ends:
            return
        while self.next_at <= max_kv_len:
            self.next_at *= NEXT_LOOK
        ratio, come = unevenness(keys[ends[0] - LOOKED_AT : ends[0]]), None
        if keys.is_cuda:
            ratio = torch.empty((), pin_memory=True).copy_(ratio, non_blocking=True)
            come = torch.cuda.Event()
            come.record()
        _UNDER_WAY.append((come, ratio, getattr(layer, "layer_name", "a layer"), self.kv_cache_dtype))
        tell()


def tell() -> None:
    """Warns of layers whose answers have come."""
    while _UNDER_WAY and (_UNDER_WAY[0][0] is None or _UNDER_WAY[0][0].query()):
        _, ratio, name, kv_cache_dtype = _UNDER_WAY.popleft()
        if ratio > MOST_UNEVEN:
            _LOG.warning(
                "%s: keys have outlier channels: their mean square is %.0f times that of the middle channel, so that %s stores the others badly; use --kv-cache-dtype attn_bf16, "
                "or name the layer in --kv-cache-dtype-skip-layers",
                name,
                ratio,
                kv_cache_dtype,
            )
