"""What a format makes of numbers, without a model."""

from __future__ import annotations

from typing import Any, Tuple

from ._arrays import Rows
from ._cache import Cache
from ._errors import ParameterError, ShapeError
from ._image import SequenceImage


def quantize(k: Any, v: Any, format: str = "int8", *, page_size: int = 64) -> SequenceImage:
    """Quantizes K and V, `[tokens, heads, dim]` each with its own dim, into pages on the CPU.

    >>> import numpy, attn
    >>> rows = numpy.random.default_rng(0).standard_normal((100, 2, 64), "f")
    >>> image = attn.quantize(rows, rows, "int8")
    >>> k, v = attn.dequantize(image)
    >>> bool(abs(k - rows).max() < 0.05), sum(map(len, image.pages)) / rows.nbytes / 2
    (True, 0.33)
    """
    shapes = [Rows(name, x).shape for name, x in (("k", k), ("v", v))]
    for name, shape in zip("kv", shapes):
        if len(shape) != 3:
            raise ShapeError(f"{name} has the shape {list(shape)}; needed: [tokens, heads, dim]")
    tokens, heads, dim = shapes[0]
    cache = Cache(format, heads=heads, dim=dim, v_dim=shapes[1][2], max_tokens=tokens, page_size=page_size, device="cpu")
    cache.append(k, v)
    return cache.save()


def dequantize(image: SequenceImage) -> Tuple[Any, Any]:
    """The K and V of pages, as attention reads them: two numpy arrays of float32, `[tokens, heads, dim]` each with its own dim."""
    if not isinstance(image, SequenceImage):
        raise ParameterError(f"image is a {type(image).__name__}; needed: what quantize gives, or attn.SequenceImage(data) of its bytes")
    cache = Cache(
        image.format,
        heads=image.heads,
        dim=image.dim,
        v_dim=image.v_dim,
        max_tokens=image.tokens,
        pages=image.num_pages,
        page_size=image.page_size,
        k_scales=image.k_scales,
        v_scales=image.v_scales,
        centres=image.centres,
        device="cpu",
    )
    cache.restore(0, image)
    return cache.export()
