"""What the tests of all files share."""

import os

import numpy
import pytest


def require(name: str, reason: str) -> None:
    """Skips a test for what this machine lacks, and says so; fails where `ATTN_REQUIRE` names it."""
    if name in os.environ.get("ATTN_REQUIRE", "").split(","):
        pytest.fail(f"ATTN_REQUIRE asks for {name}: {reason}")
    pytest.skip(f"{name} is absent: {reason}")


@pytest.fixture
def rng() -> numpy.random.Generator:
    return numpy.random.default_rng(7)


def rows(rng: numpy.random.Generator, *shape: int) -> numpy.ndarray:
    return rng.standard_normal(shape, "float32")


def static_scales(format: str, heads: int) -> dict:
    """Scales of 1 for a format that needs static ones."""
    return dict(k_scales=[1.0] * heads, v_scales=[1.0] * heads) if format in ("fp8", "int8-tensor") else {}


def filled(rng, format="int8", tokens=200, heads=2, dim=64, **options):
    """A cache on the CPU with a sequence of random rows."""
    # test_hub.py has no package of this name.
    import attn

    cache = attn.Cache(format, heads=heads, dim=dim, max_tokens=1024, device="cpu", **static_scales(format, heads), **options)
    cache.append(rows(rng, tokens, heads, dim), rows(rng, tokens, heads, dim))
    return cache


def expected(q: numpy.ndarray, k: numpy.ndarray, v: numpy.ndarray, **options) -> tuple:
    """Attention in float64: q and k `[tokens, heads or KV heads, dim]`, v `[tokens, KV heads, v_dim]`; results and log-sum-exps."""
    tokens, kv_heads, dim = k.shape
    group = q.shape[1] // kv_heads
    k, v = (numpy.repeat(x.astype("float64"), group, axis=1) for x in (k, v))
    scores = numpy.einsum("ihd,thd->hit", q.astype("float64"), k) * options.get("scale", dim**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * numpy.tanh(scores / options["softcap"])
    position = numpy.arange(tokens - q.shape[0], tokens)[:, None]
    seen = numpy.arange(tokens)[None, :] <= position
    if "window_left" in options:
        seen &= numpy.arange(tokens)[None, :] >= position - options["window_left"]
    if "chunk" in options:
        seen &= numpy.arange(tokens)[None, :] // options["chunk"] == position // options["chunk"]
    if "alibi_slopes" in options:
        slopes = numpy.asarray(options["alibi_slopes"])[:, None, None]
        scores = scores + slopes * (numpy.arange(tokens)[None, None, :] - position[None])
    scores = numpy.where(seen[None], scores, -numpy.inf)
    sums = numpy.exp(scores).sum(-1)
    if "sinks" in options:
        sums = sums + numpy.exp(numpy.asarray(options["sinks"], "float64"))[:, None]
    out = numpy.einsum("hit,thd->ihd", numpy.exp(scores) / sums[..., None], v)
    return out, numpy.log(sums).T
