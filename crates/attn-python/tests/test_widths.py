"""Keys and values of unlike widths, heads wider than 256 elements, and chunked attention, over numpy on the CPU."""

import attn
import numpy
import pytest
from conftest import expected, rows

HEADS, KV_HEADS = 16, 2
WIDTHS = [(192, 128), (64, 96), (512, 512), (576, 512), (160, 160)]


def filled(rng, format, dim, v_dim, tokens=90):
    cache = attn.Cache(format, heads=KV_HEADS, dim=dim, v_dim=v_dim, max_tokens=256, device="cpu")
    cache.append(rows(rng, tokens, KV_HEADS, dim), rows(rng, tokens, KV_HEADS, v_dim))
    return cache


@pytest.mark.parametrize("format", ["int8", "int8/int4", "int4-r2", "bf16"])
@pytest.mark.parametrize("dim, v_dim", WIDTHS)
def test_results_are_attention_over_the_exported_rows(rng, format, dim, v_dim):
    """Kills a step of a row, a group or a page that takes one width for the other."""
    cache, q = filled(rng, format, dim, v_dim), rows(rng, 3, HEADS, dim)
    k, v = cache.export()
    assert k.shape[-1] == dim and v.shape[-1] == v_dim
    out, lse = cache.attend(q, return_lse=True)
    out_64, lse_64 = expected(q, k, v)
    bound = 1e-5 if format == "bf16" else 3e-2
    assert out.shape == (3, HEADS, v_dim)
    assert numpy.abs(out - out_64).max() < bound and numpy.abs(lse - lse_64).max() < bound


def test_an_image_keeps_both_widths(rng):
    cache, q = filled(rng, "int4", 192, 128), rows(rng, 1, HEADS, 192)
    wanted, image = cache.attend(q), cache.save()
    other = attn.Cache("int4", heads=KV_HEADS, dim=192, v_dim=128, max_tokens=256, device="cpu")
    other.restore(0, image)
    assert numpy.array_equal(other.attend(q), wanted)
    same = attn.Cache("int4", heads=KV_HEADS, dim=192, max_tokens=256, device="cpu")
    with pytest.raises(attn.ShapeError, match="192/128"):
        same.restore(0, image)
    assert same.lens == [0]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_a_token_sees_its_own_chunk(rng, chunk):
    cache, q = filled(rng, "bf16", 64, 64), 3 * rows(rng, 20, HEADS, 64)
    out, lse = cache.attend(q, return_lse=True, chunk=chunk)
    out_64, lse_64 = expected(q, *cache.export(), chunk=chunk)
    assert numpy.abs(out - out_64).max() < 1e-4 and numpy.abs(lse - lse_64).max() < 1e-4


@pytest.mark.parametrize("options", [{"dim": 100}, {"dim": 128, "v_dim": 130}, {"dim": 640}, {"dim": 128, "v_dim": 0}])
def test_a_width_that_no_kernel_has_is_refused_by_name(options):
    with pytest.raises((attn.ParameterError, attn.UnsupportedError), match="dim"):
        attn.Cache("int8", heads=1, max_tokens=64, device="cpu", **options)


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chunk": 8, "causal": False}])
def test_a_chunk_that_means_nothing_is_refused(rng, options):
    cache = filled(rng, "int8", 64, 64)
    with pytest.raises((attn.ParameterError, attn.UnsupportedError), match="chunk"):
        cache.attend(rows(rng, 1, HEADS, 64), **options)
