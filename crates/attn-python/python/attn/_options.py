"""Arguments on their way into the extension: counts, numbers per head, and what changes scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional

from ._errors import ParameterError


def count(what: str, x: Any, least: int = 0) -> int:
    """`x` as a number of things; Python's own conversions would take 2.5 and True."""
    if isinstance(x, bool) or not hasattr(x, "__index__") or x.__index__() < least:
        raise ParameterError(f"{what} is {x!r}; allowed: a whole number from {least} on")
    if x.__index__() >= 1 << 63:
        raise ParameterError(f"{what} is {x!r}; allowed: less than 2^63")
    return x.__index__()


def numbers(what: str, x: Any) -> Optional[List[float]]:
    """One number for each head, from any array, sequence or torch tensor; those of several layers one behind the other."""
    if x is None:
        return None
    if hasattr(x, "tolist"):
        x = x.tolist()
    try:
        of_layers = [value if isinstance(value, (list, tuple)) else [value] for value in x]
        return [float(value) for values in of_layers for value in values]
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{what} is {x!r}; allowed: a number for each head") from error


def is_fast(arithmetic: Any) -> bool:
    """Whether prompts may be computed by floats."""
    if arithmetic not in ("exact", "fast"):
        raise ParameterError(f'arithmetic is {arithmetic!r}; allowed: "exact", "fast"')
    return arithmetic == "fast"


@dataclass(frozen=True)
class Modifiers:
    """What changes scores, and how they are computed; `Modifiers.of` checks it."""

    scale: Optional[float]
    causal: bool
    softcap: Optional[float]
    window_left: Optional[int]
    alibi_slopes: Optional[List[float]]
    sinks: Optional[List[float]]
    fast: bool

    @staticmethod
    def of(scale: Any, causal: Any, softcap: Any, window_left: Any, alibi_slopes: Any, sinks: Any, arithmetic: Any) -> "Modifiers":
        return Modifiers(
            scale=None if scale is None else float(scale),
            causal=bool(causal),
            softcap=None if softcap is None else float(softcap),
            window_left=None if window_left is None else count("window_left", window_left),
            alibi_slopes=numbers("alibi_slopes", alibi_slopes),
            sinks=numbers("sinks", sinks),
            fast=is_fast(arithmetic),
        )
