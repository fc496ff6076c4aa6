"""What the tests on a GPU share. `ATTN_REQUIRE=cuda` makes a missing GPU a failure."""

import attn
import numpy
import pytest
from conftest import require, static_scales

try:
    import torch

    REASON = None if torch.cuda.is_available() else "torch sees no CUDA device"
except ImportError as error:
    torch, REASON = None, str(error)

FORMATS = ["int8", "int4", "int8/int4", "int4-g1", "bf16", "f16", "fp8"]


@pytest.fixture(autouse=True)
def needs_gpu():
    if REASON is not None:
        require("cuda", REASON)


def on_gpu(x):
    return torch.from_numpy(numpy.ascontiguousarray(x)).cuda()


def same(a, b):
    """Whether a GPU's result has the bits of a CPU's."""
    return (a.cpu().numpy().view("uint32") == numpy.ascontiguousarray(b).view("uint32")).all()


def pair(format, **options):
    options = dict(dict(heads=2, dim=128, max_tokens=1024, sequences=4, max_q_len=200), **options)
    options.update(static_scales(format, options["heads"]))
    return attn.Cache(format, device="cuda", **options), attn.Cache(format, device="cpu", **options)


def is_integer(format):
    return format.startswith("int")


def float_bound(format, kind):
    """Relative L2 error that docs/cuda.md states for a float format, and the rounding of two outputs."""
    return (4e-3 if format == "bf16" else 5e-4) + {"float32": 0, "float16": 2**-10, "bfloat16": 2**-7}[kind]
