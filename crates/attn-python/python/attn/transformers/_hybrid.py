"""A layer with states of linear attention beside K and V (Zamba, Jamba, Falcon H1): these quantized, those as transformers has them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from .._errors import UnsupportedError
from ._layer import QuantizedLayer


class QuantizedHybridLayer(QuantizedLayer, LinearAttentionLayer):
    """`states` is transformers' `number_of_states`, by name, where its version has several."""

    def __init__(self, format: str, *, states: dict, **options: Any) -> None:
        QuantizedLayer.__init__(self, format, **options)
        LinearAttentionLayer.__init__(self, **states)

    def lazy_initialization(self, *kv: torch.Tensor, **states: Any) -> None:
        # As transformers' own hybrid layers: K and V come by position, states by name.
        if kv:
            QuantizedLayer.lazy_initialization(self, *kv)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    @batch_size.setter
    def batch_size(self, rows: int) -> None:
        """What states of transformers before 5.24 say of their rows, which are those of K and V."""

    @property
    def is_croppable(self) -> bool:
        """Whether states can go back, too."""
        return bool(getattr(self, "record_past", False)) and bool(LinearAttentionLayer.is_croppable.fget(self))

    def check_crop(self, removed: int) -> None:
        if removed and not self.is_croppable:
            raise UnsupportedError("a layer of this model has states of linear attention, which do not go back; reset the cache and begin again")
        QuantizedLayer.check_crop(self, removed)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            LinearAttentionLayer.crop(self, tokens_to_remove)
        QuantizedLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        QuantizedLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        QuantizedLayer.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedError("a layer of this model has states of linear attention, whose rows transformers does not repeat; repeat the prompts instead")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UnsupportedError("a layer of this model has states of linear attention, whose rows transformers does not choose; begin with a new cache")
