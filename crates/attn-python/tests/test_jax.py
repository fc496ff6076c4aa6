"""JAX's arrays, through DLPack, on the CPU. `ATTN_REQUIRE=jax` makes a missing JAX a failure."""

import sys
import types

import attn
import numpy
import pytest
from conftest import require, rows


@pytest.fixture(autouse=True)
def has_jax(monkeypatch):
    # This machine's GPU, if it has one, is another test's; and JAX starts threads, which a test that forks does not want.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    global jax, jnp
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        require("jax", str(error))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_arrays_of_jax_are_arrays(rng, kind):
    k, v, q = (jnp.asarray(rows(rng, 50, n, 64)).astype(kind) for n in (2, 2, 8))
    of_jax, of_numpy = (attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu") for _ in range(2))
    of_jax.append(k, v)
    of_numpy.append(*(numpy.asarray(x.astype("float32")) for x in (k, v)))
    assert of_jax.save() == of_numpy.save()
    # A part of an array, and one whose dims were exchanged.
    part = jnp.swapaxes(jnp.swapaxes(q, 0, 1)[:, 40:], 0, 1)
    out, lse = of_jax.attend(part, return_lse=True)
    wanted, wanted_lse = of_numpy.attend(numpy.asarray(part.astype("float32")), return_lse=True)
    # JAX's arrays cannot be written, so results are numpy's, in 32 bits.
    assert isinstance(out, numpy.ndarray) and out.dtype == numpy.float32
    assert (out == wanted).all() and (lse == wanted_lse).all()


def test_results_go_where_the_caller_says_and_not_into_an_array_of_jax(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu")
    k, q = jnp.asarray(rows(rng, 5, 2, 64)), jnp.asarray(rows(rng, 1, 4, 64))
    cache.append(k, k)
    out = numpy.zeros((1, 4, 64), "f")
    assert cache.attend(q, out=out) is out and (out != 0).all()
    before = numpy.asarray(q).copy()
    with pytest.raises(attn.ShapeError, match="cannot be written"):
        cache.attend(q, out=q)
    assert (numpy.asarray(q) == before).all()


class OnAGpu:
    """What an array of JAX on a GPU says of itself; none is needed to refuse it."""

    shape, dtype = (1, 2, 64), numpy.dtype("float32")

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        pytest.fail("its memory is asked for")


def test_arrays_on_a_gpu_are_refused_by_name(monkeypatch, rng):
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(Array=OnAGpu))
    cache = attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu")
    k = rows(rng, 1, 2, 64)
    for what, call in (("k", lambda: cache.append(OnAGpu(), k)), ("v", lambda: cache.append(k, OnAGpu())), ("q", lambda: cache.attend(OnAGpu()))):
        with pytest.raises(attn.ShapeError, match=f'{what} is an array of JAX on a GPU; allowed: those on the CPU: pass jax.device_put'):
            call()
    assert cache.lens == [0]


def test_batches_layers_and_refusals(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=64, sequences=2, layers=2, device="cpu")
    k, v, q = (jnp.asarray(rows(rng, 2, 5, n, 64)) for n in (2, 2, 4))
    cache.reserve([0, 1], [5, 5])
    for layer in range(2):
        cache.write(layer, k, v)
    out = cache.attend(q, layer=1)
    assert out.shape == q.shape and (cache.attend(q[1], layer=1, sequences=1) == out[1]).all()
    with pytest.raises(attn.NumberError):
        cache.attend(q * jnp.nan, layer=0)
    with pytest.raises(attn.ShapeError):
        cache.attend(q.astype("int32"), layer=0)


def test_inside_jit_there_are_no_arrays(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu")
    with pytest.raises(attn.ShapeError):
        jax.jit(lambda x: cache.append(x, x))(jnp.ones((1, 2, 64)))
    assert cache.lens == [0]
