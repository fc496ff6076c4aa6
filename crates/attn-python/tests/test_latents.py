"""Latents that are stored once: V is the first dims of K."""

import attn
import numpy
import pytest

DIM, V_DIM = 576, 512


def rows(seed, *shape):
    return numpy.random.default_rng(seed).standard_normal(shape).astype("f")


def exact(q, k):
    scores = numpy.einsum("thd,nd->thn", q, k[:, 0]) / DIM**0.5
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    return numpy.einsum("thn,nd->thd", weights / weights.sum(-1, keepdims=True), k[:, 0, :V_DIM])


def cache_of(format="int8-latents", **options):
    return attn.Cache(format, heads=1, dim=DIM, v_dim=V_DIM, max_tokens=512, **{"device": "cpu", **options})


@pytest.mark.parametrize("format, row, dtype", [("int8", DIM + 4, "float32"), ("int8", DIM + 4, "float16"), ("bf16", 2 * DIM, "float32"), ("fp8", DIM, "float16")])
def test_k_alone_is_appended(format, row, dtype):
    scales = dict(k_scales=[0.01], v_scales=[0.01]) if format == "fp8" else {}
    cache, k, q = cache_of(f"{format}-latents", **scales), rows(1, 300, 1, DIM), rows(2, 1, 16, DIM)
    cache.append(k.astype(dtype)[:200])
    cache.append(k.astype(dtype)[None, 200:])
    out = cache.attend(q)
    assert out.shape == (1, 16, V_DIM) and numpy.abs(out - exact(q, k)).max() < 0.03
    stored, values = cache.export(0)
    assert (stored[..., :V_DIM] == values).all()
    assert cache.stats().page_bytes == 64 * row


def test_layers_are_written_without_values():
    cache, k, q = cache_of(layers=2), rows(3, 70, 1, DIM), rows(4, 1, 4, DIM)
    cache.reserve([0], [70])
    for layer in range(2):
        cache.write(layer, k)
    assert (cache.attend(q, layer=0) == cache.attend(q, layer=1)).all()


def test_images_keep_latents():
    cache, k, q = cache_of(sequences=2), rows(5, 130, 1, DIM), rows(6, 1, 8, DIM)
    cache.append(k)
    other = cache_of()
    other.restore(0, cache.save(0))
    assert (other.attend(q) == cache.attend(q, sequences=0)).all()
    with pytest.raises(attn.AttnError, match="latents"):
        cache_of("int8").restore(0, cache.save(0))


@pytest.mark.parametrize("format, v, message", [("int8-latents", True, "needed: None"), ("int8", False, "needed: V beside K")])
def test_values_are_given_where_they_are_stored_alone(format, v, message):
    cache, k = cache_of(format), rows(7, 3, 1, DIM)
    with pytest.raises(attn.ParameterError, match=message):
        cache.append(k, k[..., :V_DIM] if v else None)
    assert cache.lens == [0]


@pytest.mark.parametrize("options", [dict(dim=128, v_dim=192), dict(dim=256, v_dim=64)])
def test_dims_that_are_no_part_of_a_key_are_refused(options):
    with pytest.raises(attn.ParameterError, match="int8-latents"):
        attn.Cache("int8-latents", heads=1, max_tokens=64, device="cpu", **options)


def test_pages_of_the_callers_own_take_k_alone():
    pages = attn.HostPages("int8-latents", kv_heads=1, dim=DIM, v_dim=V_DIM)
    pool, k, q = numpy.zeros(3 * pages.page_stride, "u1"), rows(8, 100, 1, DIM), rows(9, 1, 16, DIM)
    assert pages.page_bytes == 64 * (DIM + 4)
    slots = numpy.concatenate([numpy.arange(128, 192), numpy.arange(36)])
    pages.append_slots(k, None, pool, slots)
    cache = cache_of()
    cache.append(k)
    assert (pages.attend(q, pool, numpy.array([[2, 0]], "i4"), [100]) == cache.attend(q)).all()
    with pytest.raises(attn.ParameterError, match="needed: None"):
        pages.append_slots(k, k[..., :V_DIM], pool, slots)
