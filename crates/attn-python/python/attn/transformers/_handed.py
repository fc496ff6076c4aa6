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


class Handed:
    """K and V of one layer in one pass, `[batch, KV heads, tokens, dim]`, as the model gave them to its cache."""

    def __init__(self, guard: "PassGuard", index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.guard, self.index = guard, index
        self.key: Optional[torch.Tensor] = key
        self.value: Optional[torch.Tensor] = value

    def rows(self) -> Tuple["HandedRows", "HandedRows"]:
        """What the model gets in their place."""
        return HandedRows(self, "K", self.key), HandedRows(self, "V", self.value)

    def drop(self) -> None:
        """Forgets K and V, which have been attended."""
        self.key = self.value = None

    def is_given(self, key: Any, value: Any) -> bool:
        """Whether an attention is given these very K and V, each in its place."""
        return all(isinstance(x, HandedRows) and x.handed is self and x.name == name for x, name in ((key, "K"), (value, "V")))


class HandedRows(Opaque):
    """K or V that waits for its attention: its shape, type and device can be asked for, and what changes nothing may be called."""

    def __init__(self, handed: Handed, name: str, x: torch.Tensor) -> None:
        self.handed, self.name, self._x = handed, name, x
        self.shape, self.dtype, self.device, self.ndim = x.shape, x.dtype, x.device, x.dim()
        self.size, self.dim = x.size, x.dim

    def contiguous(self) -> "HandedRows":
        """Itself: the attention takes rows as they lie."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> "HandedRows":
        """Itself where there is nothing to convert."""
        if self._x.to(*args, **kwargs) is not self._x:
            self.refuse("to")
        return self

    def refuse(self, operation: str) -> NoReturn:
        self.handed.guard.refuse_reader(self.handed.index, self.name, operation)
