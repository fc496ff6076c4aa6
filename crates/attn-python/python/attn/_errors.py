"""What the package raises. Each class is also the built-in one that Python code expects."""

from typing import Optional


class AttnError(Exception):
    """Anything that the library refuses; the cache and the outputs are unchanged, unless it is a `DeviceError`."""


class ParameterError(AttnError, ValueError):
    """An argument outside what the library defines."""


class ShapeError(AttnError, ValueError):
    """An array of the wrong shape, type or device, or one that disagrees with the cache.

    `longest_prefix`, where `Cache.truncate` has raised it: the most tokens, fewer than those asked for, that the sequence can keep; None elsewhere.
    """

    longest_prefix: Optional[int] = None


class NumberError(AttnError, ValueError):
    """NaN, infinity, or a number that the format cannot hold."""


class SequenceError(AttnError, IndexError):
    """A sequence that the cache does not have."""


class CacheFullError(AttnError, RuntimeError):
    """The pool has too few free pages: free a sequence, or make a larger cache."""


class OutOfMemoryError(AttnError, MemoryError):
    """Memory that could not be allocated."""


class UnsupportedError(AttnError, NotImplementedError):
    """A device that is not here, or that has no kernel for the problem."""


class DeviceError(AttnError, RuntimeError):
    """A failure of the device or its driver."""
