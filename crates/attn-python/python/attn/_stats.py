"""What a cache holds: `attn.CacheStats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds: pages, bytes and tokens."""

    pages: int
    """Pages of the pool of each layer."""
    free_pages: int
    """Pages that no sequence owns."""
    page_bytes: int
    """Bytes of a page: K, V and their scales, of all heads of one layer."""
    tokens: int
    """Tokens of all sequences; those of a shared prefix count for each."""
    layers: int = 1
    """Layers, each with a pool of its own."""
    saturated: Optional[int] = 0
    """Numbers of K and V that were appended so far and stored as the end of the format's range, being larger: `"fp8"` and `"int8-tensor"` end where their
    scales do, `"f16"` at 65504. 0 for other formats; None where it is not known, since arrays on a device were appended. The first such number gives a
    `RuntimeWarning`, one for each cache."""
    key_outliers: Optional[float] = None
    """How uneven the channels of the keys are: their mean square over that of the middle channel, in the worst head that the cache has looked at; models without
    biases of K have 1 to 4. More than 10 gives a `RuntimeWarning`, one for each cache: rows of 4 and 8 bits then err by more than three times as much as they need. None
    before a sequence has 128 tokens."""
    checkpoint_bytes: int = 0
    """Bytes that a sequence takes in all layers for each of its checkpoints; 0 for a cache without `checkpoints`."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools."""
        return self.layers * self.pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences own, in all layers."""
        return self.layers * (self.pages - self.free_pages) * self.page_bytes
