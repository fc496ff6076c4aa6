"""Tensors on their way into launches and collectives: what is none, or holds no floats that can be read, is a `ParameterError`."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._options import numbers, refusal


def floats(what: str, x: Any) -> torch.Tensor:
    """A tensor of floats in memory, with an element at each place of its shape."""
    is_dense = isinstance(x, torch.Tensor) and x.layout is torch.strided and x.device.type != "meta"
    if not is_dense or not x.is_floating_point():
        given = f"a tensor of {x.dtype}, {x.layout}, on {x.device}" if isinstance(x, torch.Tensor) else x
        raise refusal(what, given, "a dense tensor of floats, with memory")
    return x


def float_type(what: str, x: Any) -> torch.dtype:
    """The type of results: float32 if none is given."""
    if x is None:
        return torch.float32
    if not isinstance(x, torch.dtype) or x not in (torch.float32, torch.float16, torch.bfloat16):
        raise refusal(what, x, "torch.float32, torch.float16, torch.bfloat16")
    return x


def numbers_on(what: str, x: Any, device: torch.device) -> Optional[torch.Tensor]:
    """A number for each head as float32 on a device: a tensor as it is, or a list's numbers."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    return torch.tensor(numbers(what, x), dtype=torch.float32, device=device)
