"""K and V of a layer on their way from its cache to its attention.

`Cache.update` returns them as objects that only the attention `"attn"` takes. Any other operation on them means that the model attends by other code, or
over other K and V than the cache was given; it is refused where it happens, so that no pass ends with an answer over this pass's tokens alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Optional, Tuple

import torch

from ._opaque import Opaque

if TYPE_CHECKING:
    from ._guard import PassGuard
    from ._latents import Latents


class Handed:
    """K and V of one layer in one pass, `[batch, KV heads, tokens, dim]`, as the layer stores them."""

    def __init__(self, guard: "PassGuard", index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.guard, self.index = guard, index
        self.key: Optional[torch.Tensor] = key
        self.value: Optional[torch.Tensor] = value
        # What the layer's queries and outputs become where latents are stored.
        self.latents: Optional["Latents"] = None
        self._given: Tuple[Any, Any] = (None, None)

    def rows(self) -> Tuple["HandedRows", "HandedRows"]:
        """What the model gets in their place, and gives to its attention."""
        self._given = HandedRows(self, "K", self.key), HandedRows(self, "V", self.value)
        return self._given

    def latent_rows(self, latents: torch.Tensor, rotary: torch.Tensor) -> Tuple["HandedRows", "HandedRows"]:
        """What a model with latent attention gets, and gives to its `expand_kv`."""
        return HandedRows(self, "latents", latents), HandedRows(self, "rotary keys", rotary)

    def expanded(self, latents: "Latents", rows: Tuple[torch.Tensor, torch.Tensor]) -> Tuple["HandedRows", "HandedRows"]:
        """What `expand_kv` returns in the place of K and V of all heads; `rows` have their shapes."""
        self.latents = latents
        self._given = HandedRows(self, "K", rows[0]), HandedRows(self, "V", rows[1])
        return self._given

    def drop(self) -> None:
        """Forgets K and V, which have been attended."""
        self.key = self.value = None

    def is_given(self, key: Any, value: Any) -> bool:
        """Whether an attention is given these very K and V, each in its place."""
        return key is self._given[0] and value is self._given[1]


class HandedRows(Opaque):
    """K or V that waits for its attention: its shape, type and device can be asked for, and what changes nothing may be called."""

    def __init__(self, handed: Handed, name: str, x: torch.Tensor) -> None:
        self.handed, self.name = handed, name
        self.shape, self.dtype, self.device, self.ndim = x.shape, x.dtype, x.device, x.dim()
        # Without elements: K and V themselves are free when they have been attended (`Handed.drop`).
        self._like = x.new_empty((0,) * x.dim())

    def size(self, dim: Optional[int] = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def contiguous(self) -> "HandedRows":
        """Itself: the attention takes rows as they lie."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> "HandedRows":
        """Itself where there is nothing to convert."""
        if self._like.to(*args, **kwargs) is not self._like:
            self.refuse("to")
        return self

    def refuse(self, operation: str) -> NoReturn:
        self.handed.guard.refuse_reader(self.handed.index, self.name, operation)
