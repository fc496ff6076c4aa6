"""Caches of several layers, and tokens that no window sees any more, over numpy on the CPU."""

import dataclasses

import attn
import numpy
import pytest
from conftest import rows

SHAPE = dict(heads=2, dim=64, max_tokens=512, device="cpu")


@pytest.mark.parametrize("format", ["int8", "int4", "bf16"])
def test_layers_of_one_cache_are_a_cache_for_each(rng, format):
    shared = attn.Cache(format, sequences=3, layers=3, **SHAPE)
    own = [attn.Cache(format, sequences=3, **SHAPE) for _ in range(3)]
    for counts in ([40, 3], [1, 1], [5, 1]):
        shared.reserve([2, 0], counts)
        assert shared.open_step == list(zip([2, 0], counts))
        # In any order.
        for layer in (1, 2, 0):
            k, v, q = (rows(rng, sum(counts), n, 64) for n in (2, 2, 8))
            shared.write(layer, k, v)
            own[layer].append(k, v, sequences=[2, 0], tokens=counts)
            a, a_lse = shared.attend(q, layer=layer, sequences=[2, 0], q_lens=counts, return_lse=True)
            b, b_lse = own[layer].attend(q, sequences=[2, 0], q_lens=counts, return_lse=True)
            assert (a == b).all() and (a_lse == b_lse).all()
        assert shared.open_step is None
    assert shared.lens == own[0].lens == [5, 0, 46]
    for layer in range(3):
        assert all((a == b).all() for a, b in zip(shared.export(2, layer=layer), own[layer].export(2)))
    image, stats = shared.save(2), shared.stats()
    assert image.pages == tuple(page for cache in own for page in cache.save(2).pages)
    assert stats.layers == 3 and stats.pool_bytes == 3 * own[0].stats().pool_bytes and stats.used_bytes == 3 * own[0].stats().used_bytes
    shared.restore(1, image)
    assert (shared.attend(q, layer=1, sequences=1, q_lens=[6]) == shared.attend(q, layer=1, sequences=2, q_lens=[6])).all()
    with pytest.raises(attn.ShapeError, match="layers is 3 in the image"):
        own[0].restore(1, image)


def test_four_dims_are_as_many_tokens_for_each(rng):
    a, b = (attn.Cache(sequences=2, layers=1, **SHAPE) for _ in range(2))
    k, v = rows(rng, 2, 5, 2, 64), rows(rng, 2, 5, 2, 64)
    a.reserve([1, 0], [5, 5])
    a.write(0, k, v)
    b.append(k, v, sequences=[1, 0])
    assert a.save(0) == b.save(0) and a.save(1) == b.save(1)
    a.reserve([1, 0], [4, 6])
    with pytest.raises(attn.ShapeError, match="three dims"):
        a.write(0, k, v)


def test_a_step_that_fails_in_a_layer_is_taken_back_whole(rng):
    cache = attn.Cache("int4", sequences=2, layers=3, **SHAPE)
    k, v = rows(rng, 70, 2, 64), rows(rng, 70, 2, 64)
    cache.reserve([0], [70])
    for layer in range(3):
        cache.write(layer, k, v)
    before, stats = cache.save(0), cache.stats()
    cache.reserve([0, 1], [60, 1])
    cache.write(2, k[:61], v[:61])
    with pytest.raises(attn.NumberError):
        cache.write(0, k[:61] * numpy.nan, v[:61])
    with pytest.raises(attn.ShapeError, match="open step"):
        cache.save(0)
    cache.cancel_step()
    cache.cancel_step()
    assert cache.lens == [70, 0] and dataclasses.replace(cache.stats(), key_outliers=None) == stats and cache.save(0) == before


@pytest.mark.parametrize(
    "error, call",
    [
        (attn.ParameterError, lambda c, x: c.append(x, x)),
        (attn.ParameterError, lambda c, x: c.attend(x)),
        (attn.ParameterError, lambda c, x: c.attend(x, layer=2)),
        (attn.ParameterError, lambda c, x: c.attend(x, layer=-1)),
        (attn.ParameterError, lambda c, x: c.export(0)),
        (attn.ParameterError, lambda c, x: c.export(0, layer=2)),
        (attn.ShapeError, lambda c, x: c.write(0, x, x)),
        (attn.ParameterError, lambda c, x: c.write(2, x, x)),
        (attn.ParameterError, lambda c, x: c.write(True, x, x)),
        (attn.SequenceError, lambda c, x: c.reserve([2], [1])),
        (attn.ParameterError, lambda c, x: c.reserve([0, 0], [1, 1])),
        (attn.ShapeError, lambda c, x: c.reserve([0, 1], [1])),
        (attn.CacheFullError, lambda c, x: c.reserve([0], [4000])),
        (attn.SequenceError, lambda c, x: c.drop_before(2, 0)),
        (attn.ParameterError, lambda c, x: c.drop_before(0, 4)),
        (attn.ParameterError, lambda c, x: c.drop_before(0, -1)),
        (attn.ParameterError, lambda c, x: c.add_sequences(-1)),
        (attn.ParameterError, lambda c, x: c.add_sequences(1 << 40)),
        (attn.ParameterError, lambda c, x: c.add_pages(1 << 60)),
    ],
)
def test_refusals_change_nothing(rng, error, call):
    cache = attn.Cache(sequences=2, layers=2, **SHAPE)
    x = rows(rng, 3, 2, 64)
    cache.reserve([0], [3])
    for layer in range(2):
        cache.write(layer, x, x)
    before, stats = cache.save(0), cache.stats()
    with pytest.raises(error) as raised:
        call(cache, x[:1])
    assert len(str(raised.value)) > 20
    assert cache.save(0) == before and cache.stats() == stats and cache.sequences == 2 and cache.open_step is None
    with pytest.raises(attn.ParameterError):
        attn.Cache(layers=0, **SHAPE)
    with pytest.raises(attn.ParameterError):
        attn.Cache(layers=1 << 40, **SHAPE)


def test_an_unwritten_layer_is_not_attended_and_a_written_one_not_written_again(rng):
    cache = attn.Cache(layers=2, **SHAPE)
    x = rows(rng, 1, 2, 64)
    cache.reserve([0], [1])
    with pytest.raises(attn.ShapeError, match="layer 0 lacks"):
        cache.attend(x, layer=0)
    with pytest.raises(attn.ShapeError, match="is open"):
        cache.reserve([0], [1])
    with pytest.raises(attn.ShapeError):
        cache.write(0, rows(rng, 2, 2, 64), rows(rng, 2, 2, 64))
    cache.write(0, x, x)
    with pytest.raises(attn.ShapeError, match="has written layer 0"):
        cache.write(0, x, x)
    cache.attend(x, layer=0)
    for call in (lambda: cache.truncate(0, 0), lambda: cache.free(0), lambda: cache.drop_before(0, 0)):
        with pytest.raises(attn.ShapeError, match="open step"):
            call()
    cache.write(1, x, x)
    assert cache.lens == [1]


def test_static_scales_are_those_of_each_layer(rng):
    scales = numpy.array([[0.5, 0.25], [0.125, 2.0]])
    shared = attn.Cache("fp8", layers=2, k_scales=scales, v_scales=scales.reshape(-1), **SHAPE)
    k, v, q = (rows(rng, 3, 2, 64) for _ in range(3))
    shared.reserve([0], [3])
    for layer in range(2):
        own = attn.Cache("fp8", k_scales=scales[layer], v_scales=scales[layer], **SHAPE)
        own.append(k, v)
        shared.write(layer, k, v)
        assert (shared.attend(q, layer=layer) == own.attend(q)).all()
    with pytest.raises(attn.AttnError):
        attn.Cache("fp8", layers=2, k_scales=[1.0] * 3, v_scales=[1.0] * 4, **SHAPE)


@pytest.mark.parametrize("format", ["int8", "int4", "bf16"])
def test_a_window_keeps_its_bits_while_pages_stay_bounded(rng, format):
    options = dict(heads=2, dim=64, page_size=16, device="cpu")
    kept = attn.Cache(format, max_tokens=2048, **options)
    # A window of 100 tokens, a tile of 64, and 30 new ones.
    few = kept.pages_for(100 + 64 + 30)
    dropped = attn.Cache(format, max_tokens=0, pages=few, **options)
    for n in [30] * 40 + [1] * 40:
        k, v, q = (rows(rng, n, heads, 64) for heads in (2, 2, 4))
        outs = []
        for cache in (kept, dropped):
            cache.append(k, v)
            outs.append(cache.attend(q, window_left=99))
        assert (outs[0] == outs[1]).all()
        dropped.drop_before(0, max(0, dropped.lens[0] - 99))
    assert dropped.lens == kept.lens == [1240]
    assert dropped.first_tokens == [1240 - 99 - (1240 - 99) % 64] and kept.first_tokens == [0]
    for call in (lambda: dropped.attend(q), lambda: dropped.save(), lambda: dropped.export(), lambda: dropped.attend(q, window_left=160)):
        with pytest.raises(attn.ShapeError, match=str(dropped.first_tokens[0])):
            call()


def test_caches_grow_in_sequences_and_pages(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=64, sequences=1, layers=2, device="cpu")
    x = rows(rng, 64, 2, 64)
    cache.reserve([0], [64])
    for layer in range(2):
        cache.write(layer, x, x)
    before = cache.save(0)
    cache.add_sequences(2)
    assert cache.lens == [64, 0, 0] and cache.sequences == 3
    with pytest.raises(attn.CacheFullError):
        cache.reserve([2], [1])
    cache.add_pages(1)
    assert cache.stats().pages == 2
    cache.reserve([2], [64])
    for layer in range(2):
        cache.write(layer, x, x)
    assert cache.save(2) == before == cache.save(0)
