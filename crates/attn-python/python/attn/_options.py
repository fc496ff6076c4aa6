"""Arguments on their way into the extension: whatever Python passes becomes a whole number, a float, a flag, a text or a list of these, or a
`ParameterError` that says what was given and what is allowed. Arrays of numbers, numpy's and torch's, are lists of numbers; `_arrays` takes rows."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any, List, Optional, Sequence, Tuple

from ._errors import ParameterError, ShapeError


def refusal(what: str, x: Any, allowed: str) -> ParameterError:
    """The error for an argument, which is shown as far as it is short."""
    try:
        shown = repr(x)
    except Exception:
        shown = ""
    if not shown or len(shown) > 200:
        shown = f"a {type(x).__name__}"
    return ParameterError(f"{what} is {shown}; allowed: {allowed}")


def _plain(x: Any) -> Any:
    """An array of numbers, or a number of a library's own type, as Python's."""
    return x.tolist() if hasattr(x, "tolist") and not isinstance(x, type) else x


def count(what: str, x: Any, least: int = 0) -> int:
    """`x` as a number of things, below 2^63; Python's own conversions would take 2.5 and True."""
    allowed = f"a whole number from {least} on"
    try:
        plain = _plain(x)
        n = None if isinstance(plain, bool) else index(plain)
    except Exception as error:
        raise refusal(what, x, allowed) from error
    if n is None or n < least:
        raise refusal(what, x, allowed)
    if n >= 1 << 63:
        raise refusal(what, x, "less than 2^63")
    return n


def head_dim(dim: int, v_dim: int) -> str:
    """Dims of a head's key and of its value, as the library writes them."""
    return str(dim) if dim == v_dim else f"{dim}/{v_dim}"


def _items(what: str, x: Any, allowed: str) -> List[Any]:
    """The items of a sequence, or of an array of one dim."""
    try:
        if isinstance(x, (str, bytes, bytearray, dict, set, frozenset)):
            raise TypeError("no list")
        items = _plain(x)
        # Only what has a length ends.
        len(items)
        return list(items)
    except Exception as error:
        raise refusal(what, x, allowed) from error


def counts(what: str, x: Any, least: int = 0) -> List[int]:
    """Numbers of things."""
    return [count(what, n, least) for n in _items(what, x, f"whole numbers from {least} on, in a list")]


def selected_pages(what: str, x: Any, shape: Sequence[int]) -> Optional[Tuple[List[int], List[int]]]:
    """Numbers of pages for each KV head of each sequence, `shape` such lists, in ascending order one behind the other; and how many each has."""
    if x is None:
        return None
    allowed = f"whole numbers [{shape[0]} sequences, {shape[1]} KV heads, pages], -1 where there are no more"
    of_heads = [_items(what, heads, allowed) for heads in _items(what, x, allowed)]
    if [len(heads) for heads in of_heads] != [shape[1]] * shape[0]:
        raise ShapeError(f"{what} has lists for {[len(heads) for heads in of_heads][:8]} KV heads; needed: {allowed}")
    lists = [sorted(count(what, page) for page in _items(what, own, allowed) if page != -1) for heads in of_heads for own in heads]
    if any(own and own[-1] >= 1 << 32 for own in lists):
        raise refusal(what, max(own[-1] for own in lists if own), "pages of the sequence")
    return [page for own in lists for page in own], [len(own) for own in lists]


def one_or_more(what: str, x: Any) -> List[int]:
    """One number of a thing, or several."""
    try:
        is_list = hasattr(_plain(x), "__len__")
    except Exception as error:
        raise refusal(what, x, "a whole number, or a list of them") from error
    return counts(what, x) if is_list else [count(what, x)]


def optional_count(what: str, x: Any, least: int = 0) -> Optional[int]:
    """A number of things, or None."""
    return None if x is None else count(what, x, least)


def number(what: str, x: Any) -> float:
    """A real number."""
    try:
        plain = _plain(x)
        if isinstance(plain, (bool, str, bytes, bytearray)):
            raise TypeError("no number")
        return float(plain)
    except Exception as error:
        raise refusal(what, x, "a number") from error


def optional_number(what: str, x: Any) -> Optional[float]:
    """A real number, or None."""
    return None if x is None else number(what, x)


def numbers(what: str, x: Any) -> Optional[List[float]]:
    """One number for each head, from any array, sequence or torch tensor; those of several layers one behind the other."""
    if x is None:
        return None
    allowed = "a number for each head"
    of_layers = [value if isinstance(value, (list, tuple)) else [value] for value in _items(what, x, allowed)]
    try:
        return [number(what, value) for values in of_layers for value in values]
    except ParameterError as error:
        raise refusal(what, x, allowed) from error


def flag(what: str, x: Any) -> bool:
    """True or False; Python's own conversion would take "no" for True."""
    try:
        plain = _plain(x)
    except Exception as error:
        raise refusal(what, x, "True, False") from error
    if not isinstance(plain, bool):
        raise refusal(what, x, "True, False")
    return plain


def text(what: str, x: Any, allowed: str) -> str:
    """A name."""
    if not isinstance(x, str):
        raise refusal(what, x, allowed)
    return str(x)


def format_name(x: Any) -> str:
    """The name of a format, which the extension reads."""
    return text("format", x, 'a name such as "int8"')


def is_of_latents(format: str) -> bool:
    """Whether a format stores V as the first dims of K."""
    return format.endswith("-latents")


def check_values(format: str, v: Any) -> None:
    """Refuses V beside latents, and K without V elsewhere."""
    if is_of_latents(format) != (v is None):
        given, needed = ("none", f"V beside K; {format} stores both") if v is None else ("given", f"None; {format} stores K, whose first dims are V")
        raise ParameterError(f"v is {given}; needed: {needed}")


def device_name(x: Any) -> Optional[str]:
    """The name of a device, which the extension reads; torch's own say what they are."""
    if x is None:
        return None
    if type(x).__module__ == "torch" and type(x).__name__ == "device":
        return str(x)
    return text("device", x, '"cpu", "wgpu", "cuda", "cuda:1" and so on; None for the best one here')


def is_fast(arithmetic: Any) -> bool:
    """Whether prompts may be computed by floats."""
    allowed = '"exact", "fast"'
    if text("arithmetic", arithmetic, allowed) not in ("exact", "fast"):
        raise refusal("arithmetic", arithmetic, allowed)
    return arithmetic == "fast"


@dataclass(frozen=True)
class Modifiers:
    """What changes scores, and how they are computed; `Modifiers.of` checks it."""

    scale: Optional[float]
    causal: bool
    softcap: Optional[float]
    window_left: Optional[int]
    chunk: Optional[int]
    alibi_slopes: Optional[List[float]]
    sinks: Optional[List[float]]
    fast: bool

    @staticmethod
    def of(scale: Any, causal: Any, softcap: Any, window_left: Any, chunk: Any, alibi_slopes: Any, sinks: Any, arithmetic: Any) -> "Modifiers":
        return Modifiers(
            scale=optional_number("scale", scale),
            causal=flag("causal", causal),
            softcap=optional_number("softcap", softcap),
            window_left=optional_count("window_left", window_left),
            chunk=optional_count("chunk", chunk, 1),
            alibi_slopes=numbers("alibi_slopes", alibi_slopes),
            sinks=numbers("sinks", sinks),
            fast=is_fast(arithmetic),
        )
