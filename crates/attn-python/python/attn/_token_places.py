"""Where a step's tokens stand in their sequences, in memory that CUDA graphs read."""

from __future__ import annotations

from typing import Tuple

import torch


class TokenPlaces:
    """The first page of the sequence and the position of each token of a step, of up to `tokens`, int32: at the same addresses in every step."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        # Each in memory of its own, whose address suits kernels for any number of tokens.
        self._both = [torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2)]

    def of(self, starts: torch.Tensor, lens: torch.Tensor, first_pages: torch.Tensor, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Those of `count` tokens, found on the device.

        Args:
            starts: int32 `[sequences + 1]`: the first query token of each sequence, then the end of the last one's. Tokens behind it are padding, which have any place.
            lens: int32 `[sequences]`: tokens of each sequence, those of the step included.
            first_pages: int32 `[sequences]`.
        """
        both = [kept[:count] if count <= len(kept) else kept.new_empty(count) for kept in self._both]
        sequences = len(lens)
        if sequences > 0 and count > 0:
            tokens = torch.arange(count, dtype=starts.dtype, device=starts.device)
            of = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=sequences - 1)
            # A sequence's last token is the last of its length.
            behind = lens - starts[1:]
            torch.index_select(first_pages, 0, of, out=both[0])
            torch.add(tokens, behind.index_select(0, of), out=both[1])
        return both[0], both[1]
