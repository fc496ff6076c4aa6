"""Attention over a quantized KV cache, at memory speed, with the same bits everywhere.

`Cache` keeps K and V of an attention layer in pages of int8, int4 or other formats, and attends over them: on NVIDIA GPUs, on the CPU, and through
Vulkan. `attn.transformers` puts it under Hugging Face models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from . import _attn
from ._cache import Cache
from ._errors import (
    AttnError,
    CacheFullError,
    DeviceError,
    NumberError,
    OutOfMemoryError,
    ParameterError,
    SequenceError,
    ShapeError,
    UnsupportedError,
)
from ._host_pages import HostPages
from ._image import SequenceImage
from ._quantize import dequantize, quantize
from ._spans import merge_spans
from ._stats import CacheStats

__version__ = _attn.version()

__all__ = [
    "AttnError",
    "Cache",
    "CacheFullError",
    "CacheStats",
    "Device",
    "DeviceError",
    "HostPages",
    "NumberError",
    "OutOfMemoryError",
    "ParameterError",
    "SequenceError",
    "SequenceImage",
    "ShapeError",
    "UnsupportedError",
    "dequantize",
    "devices",
    "merge_spans",
    "quantize",
]


@dataclass(frozen=True)
class Device:
    """A backend, and whether it works here."""

    backend: str
    """`"cuda"`, `"wgpu"` or `"cpu"`: what `Cache(device=…)` takes."""
    name: Optional[str]
    """The device's own name; None if the backend is absent."""
    detail: str
    """What is known of the device."""
    absent: Optional[str]
    """Why the backend is absent, and what to do about it; None if it works."""


def devices() -> List[Device]:
    """Every backend, the preferred one first, with the reason for each that is absent."""
    return [Device(*device) for device in _attn.devices()]
