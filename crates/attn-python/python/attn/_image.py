"""`attn.SequenceImage`: a sequence outside its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Tuple

from . import _attn
from ._errors import ParameterError
from ._options import head_dim


@dataclass(frozen=True, init=False, repr=False)
class SequenceImage:
    """A sequence outside its cache, for `Cache.restore`: one block of bytes that says what it holds and has a checksum, the same that the Rust and C
    interfaces write and read. It can be kept in a file or sent as it is, and it can be pickled.

    Args:
        data: bytes, or anything with a buffer of bytes, such as a memory map: what another image's `data` was.

    Raises:
        ParameterError, ShapeError for what is not a whole image, or damaged.

    >>> import numpy, attn
    >>> rows = numpy.ones((100, 2, 64), "f")
    >>> image = attn.quantize(rows, rows, "int8")
    >>> stored = image.data
    >>> attn.SequenceImage(stored) == image, image.tokens, image.format
    (True, 100, 'int8')
    """

    data: bytes
    """The header and the pages."""

    def __init__(self, data: Any, **others: Any) -> None:
        if others:
            raise ParameterError(f"an image has no argument {next(iter(others))!r}; allowed: data, its bytes, which say all the rest")
        if not isinstance(data, bytes):
            try:
                data = memoryview(data).tobytes()
            except Exception as error:
                raise ParameterError(f"data is a {type(data).__name__}; needed: the bytes of an image") from error
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "_header", _attn.image_header(data))

    def __reduce__(self) -> Tuple[Any, ...]:
        return SequenceImage, (self.data,)

    @property
    def format(self) -> str:
        """The formats of K and V."""
        return self._header["format"]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self._header["heads"]

    @property
    def dim(self) -> int:
        """Dims of a head's key."""
        return self._header["dim"]

    @property
    def v_dim(self) -> int:
        """Dims of a head's value."""
        return self._header["v_dim"]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._header["page_size"]

    @property
    def layers(self) -> int:
        """Layers."""
        return self._header["layers"]

    @property
    def tokens(self) -> int:
        """Tokens."""
        return self._header["tokens"]

    @property
    def k_scales(self) -> Optional[Tuple[float, ...]]:
        """Static scales of K, one for each layer and head; None where the format has none."""
        return tuple(self._header["k_scales"]) or None

    @property
    def v_scales(self) -> Optional[Tuple[float, ...]]:
        """Static scales of V, one for each layer and head; None where the format has none."""
        return tuple(self._header["v_scales"]) or None

    @property
    def centres(self) -> bool:
        """Whether keys are stored without their centres, which follow the pages: that of a cache with `centres`."""
        return self._header["centres_bytes"] > 0

    @property
    def num_pages(self) -> int:
        """Pages of all layers."""
        return (self._end_of_pages - self._header["header_bytes"]) // self._header["page_bytes"]

    @property
    def pages(self) -> Tuple[bytes, ...]:
        """The pages, copied: those of the first layer, then of the next; in each the sequence's pages in token order, then those of residuals. Residuals at
        checkpoints lie behind them and are none of these."""
        size, first = self._header["page_bytes"], self._header["header_bytes"]
        return tuple(self.data[at : at + size] for at in range(first, self._end_of_pages, size))

    @property
    def _end_of_pages(self) -> int:
        return self._header["header_bytes"] + self._header["pages_bytes"]

    def __bytes__(self) -> bytes:
        return self.data

    def __repr__(self) -> str:
        return f"<attn.SequenceImage: {self.tokens} tokens, {self.format}, heads={self.heads}, dim={head_dim(self.dim, self.v_dim)}, layers={self.layers}, {len(self.data)} bytes>"
