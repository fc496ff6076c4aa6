"""`attn.Cache` over numpy on the CPU."""

import copy
import dataclasses
import pathlib
import pickle
import re
import warnings

import attn
import numpy
import pytest
from conftest import expected, filled, rows, static_scales

FORMATS = ["int8", "int4", "int8/int4", "int4-g1", "bf16", "f16", "fp8"]


@pytest.mark.parametrize("format", FORMATS)
def test_results_are_attention_over_the_exported_rows(rng, format):
    cache = filled(rng, format)
    q = rows(rng, 3, 8, 64)
    out, lse = cache.attend(q, return_lse=True)
    out_64, lse_64 = expected(q, *cache.export())
    # 4 bits read the newest tokens finer than the formula's weights are; the rest is 8-bit arithmetic.
    bound = 1e-5 if format in ("bf16", "f16", "fp8") else 3e-2
    assert numpy.abs(out - out_64).max() < bound
    assert numpy.abs(lse - lse_64).max() < bound
    assert out.dtype == lse.dtype == numpy.float32


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"softcap": 2.0},
        {"window_left": 9},
        {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
        {"sinks": [0.5, -1.0, 3.0, 6.0]},
        {"sinks": [4.0] * 4, "window_left": 3, "softcap": 5.0, "scale": 0.2},
    ],
)
def test_modifiers_reach_the_arithmetic(rng, options):
    cache = filled(rng, "bf16")
    q = 3 * rows(rng, 2, 4, 64)
    out, lse = cache.attend(q, return_lse=True, **options)
    out_64, lse_64 = expected(q, *cache.export(), **options)
    assert numpy.abs(out - out_64).max() < 1e-4 and numpy.abs(lse - lse_64).max() < 1e-4
    plain = cache.attend(q)
    assert numpy.abs(plain - out_64).max() > 1e-2, "without the modifier the result would be another"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("level", [-1e6, -6e4, 6e4, 1e6])
def test_scores_of_any_level_are_scores(rng, format, level):
    """No finite number stands for a score that is masked: the token whose score exceeds all others by far is seen wherever they all lie."""
    cache = attn.Cache(format, heads=1, dim=64, max_tokens=128, device="cpu", **{name: [1e3] for name in static_scales(format, 1)})
    v = rows(rng, 100, 1, 64)
    k = numpy.full((100, 1, 64), level / 64, "float32")
    k[7] += abs(level) / 640
    cache.append(k, v)
    out, lse = cache.attend(numpy.ones((1, 4, 64), "float32"), scale=1.0, return_lse=True)
    assert numpy.abs(out - cache.export()[1][7]).max() < 0.05
    assert numpy.abs(lse - (level + abs(level) / 10)).max() < abs(level) / 12


def test_fast_is_exact_on_a_cpu(rng):
    cache = filled(rng)
    q = rows(rng, 40, 8, 64)
    assert (cache.attend(q, arithmetic="fast") == cache.attend(q, arithmetic="exact")).all()
    with pytest.raises(attn.ParameterError, match="arithmetic is 'rough'; allowed: \"exact\", \"fast\""):
        cache.attend(q, arithmetic="rough")


def test_not_causal_sees_every_token(rng):
    cache = filled(rng, "bf16", tokens=9)
    q = rows(rng, 4, 4, 64)
    k, v = cache.export()
    for i in range(4):
        alone, _ = expected(q[i : i + 1], k, v)
        assert numpy.abs(cache.attend(q, causal=False)[i] - alone[0]).max() < 1e-4


@pytest.mark.parametrize("format", ["int8", "int4", "bf16"])
def test_a_token_has_the_same_bits_alone_in_a_batch_and_in_a_prompt(rng, format):
    k, v, q = (rows(rng, 150, n, 64) for n in (2, 2, 8))
    options = dict(heads=2, dim=64, max_tokens=512, max_q_len=150, device="cpu")
    prompt = attn.Cache(format, **options)
    prompt.append(k, v)
    whole = prompt.attend(q)
    alone = attn.Cache(format, **options)
    pieces = attn.Cache(format, sequences=3, **options)
    for start in range(0, 150, 37):
        part = slice(start, start + 37)
        n = len(k[part])
        # Another sequence grows beside it.
        pieces.append(
            numpy.concatenate([rows(rng, 2, 2, 64), k[part]]),
            numpy.concatenate([rows(rng, 2, 2, 64), v[part]]),
            sequences=[0, 2],
            tokens=[2, n],
        )
        out = pieces.attend(numpy.concatenate([q[part], rows(rng, 1, 8, 64)]), sequences=[2, 0], q_lens=[n, 1])
        assert (out[:n] == whole[part]).all()
    for i in range(150):
        alone.append(k[i : i + 1], v[i : i + 1])
        assert (alone.attend(q[i : i + 1]) == whole[i]).all(), i


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_drafts_are_taken_back_and_prefixes_shared(rng, format):
    k, v, q = (rows(rng, 100, n, 64) for n in (1, 1, 4))
    cache = attn.Cache(format, heads=1, dim=64, max_tokens=256, sequences=3, device="cpu")
    cache.append(k[:90], v[:90])
    cache.fork(0, 1)
    used = cache.stats().used_bytes
    cache.append(k[95:100], v[95:100])
    cache.truncate(0, 92)
    assert cache.lens == [92, 90, 0] and cache.stats().used_bytes > used
    cache.append(k[90:95], v[90:95], sequences=1)
    straight = attn.Cache(format, heads=1, dim=64, max_tokens=256, device="cpu")
    straight.append(k[:90], v[:90])
    straight.append(k[90:95], v[90:95])
    assert (cache.attend(q[:1], sequences=1) == straight.attend(q[:1])).all()
    for sequence in range(3):
        cache.free(sequence)
    assert cache.stats().free_pages == cache.stats().pages and cache.lens == [0, 0, 0]


@pytest.mark.parametrize("format", ["int4", "int8/int4", "int8"])
def test_a_fork_goes_on_from_a_checkpoint(rng, format):
    """Kills an option that does not reach the cache, and a refusal without the length to go back to."""
    k, v, q = (rows(rng, 900, n, 64) for n in (1, 1, 4))
    options = dict(heads=1, dim=64, max_tokens=1024, sequences=2, device="cpu")
    cache = attn.Cache(format, checkpoints=256, **options)
    has_window = "int4" in format
    assert cache.stats().checkpoint_bytes == (2 * cache.stats().page_bytes if has_window else 0)
    cache.append(k, v)
    cache.fork(0, 1)
    if has_window:
        with pytest.raises(attn.ShapeError, match="can be truncated to 512 or to 704, but to no length between, such as 700") as refused:
            cache.truncate(1, 700)
        assert refused.value.longest_prefix == cache.longest_prefix(1, 700) == 512
    else:
        assert cache.longest_prefix(1, 700) == 700
    cache.truncate(1, 512)
    straight = attn.Cache(format, checkpoints=256, **options)
    straight.append(k[:512], v[:512])
    assert cache.save(1) == straight.save(0)
    assert (cache.attend(q[:1], sequences=1) == straight.attend(q[:1])).all()
    # Pages without those at checkpoints, and back.
    image = cache.save(0)
    size = cache.stats().page_bytes
    assert all(len(page) == size for page in image.pages) and image.num_pages == len(image.pages) == 15 + (4 if has_window else 0)
    straight.free(0)
    straight.restore(0, image)
    assert straight.longest_prefix(0, 300) == (256 if has_window else 300)
    bare = attn.Cache(format, **options)
    bare.restore(0, image)
    assert bare.longest_prefix(0, 300) == (64 if has_window else 300)
    with pytest.raises(attn.ParameterError, match="checkpoints is 100; allowed: multiples of 64"):
        attn.Cache(format, checkpoints=100, **options)


def test_a_sequence_leaves_its_cache_and_comes_back(rng):
    cache = filled(rng, "int4")
    image, q = cache.save(), rows(rng, 1, 4, 64)
    before = cache.attend(q)
    cache.free(0)
    cache.restore(0, image)
    assert (cache.attend(q) == before).all()
    # fp8 and int8-tensor pages have the same size; an image says what it is.
    fp8 = filled(rng, "fp8").save()
    other = attn.Cache("int8-tensor", heads=2, dim=64, max_tokens=1024, device="cpu", **static_scales("int8-tensor", 2))
    with pytest.raises(attn.ShapeError, match="format is fp8 in the image"):
        other.restore(0, fp8)
    assert other.lens == [0]


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_an_image_is_one_block_of_bytes_with_a_checksum(rng, format):
    image = filled(rng, format, tokens=70, page_size=32).save()
    assert (image.format, image.heads, image.dim, image.page_size, image.layers, image.tokens) == (format, 2, 64, 32, 1, 70)
    assert len(image.pages) == image.num_pages >= 3 and image.data[image._header["header_bytes"] : image._end_of_pages] == b"".join(image.pages)
    assert image.k_scales == ((1.0, 1.0) if format == "fp8" else None)
    for same in (attn.SequenceImage(image.data), attn.SequenceImage(bytearray(bytes(image))), pickle.loads(pickle.dumps(image)), copy.deepcopy(image)):
        assert same == image and hash(same) == hash(image) and same.tokens == 70
    for at in rng.integers(0, len(image.data), 300).tolist() + list(range(130)):
        damaged = bytearray(image.data)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        with pytest.raises(attn.AttnError):
            attn.SequenceImage(damaged)
    for wrong in (image.data[:-1], image.data + b"x", b"", b"attn-seq", memoryview(image.data)[::2], 5, None, "attn-seq", [1, 2]):
        with pytest.raises(attn.AttnError):
            attn.SequenceImage(wrong)
    with pytest.raises(attn.ParameterError, match="'tokens'"):
        dataclasses.replace(image, tokens=-1)
    for field in ("tokens", "data"):
        with pytest.raises(AttributeError):
            setattr(image, field, 5)


def test_a_cache_is_copied_whole_and_not_pickled(rng):
    for format in ("int8", "int4"):
        cache = filled(rng, format, sequences=3)
        cache.fork(0, 1)
        x, q = rows(rng, 5, 2, 64), rows(rng, 1, 4, 64)
        for copied in (copy.deepcopy(cache), copy.copy(cache)):
            assert copied.lens == cache.lens and copied.stats() == cache.stats() and copied.device == cache.device
            before = cache.save()
            copied.append(x, x, sequences=1)
            assert cache.lens == [200, 200, 0] and copied.lens == [200, 205, 0] and cache.save() == before
            straight = attn.Cache(format, heads=2, dim=64, max_tokens=1024, device="cpu")
            straight.restore(0, before)
            straight.append(x, x)
            assert (copied.attend(q, sequences=1) == straight.attend(q)).all()
            assert (copied.attend(q) == cache.attend(q)).all()
        with pytest.raises(attn.UnsupportedError, match="save"):
            pickle.dumps(cache)
    dropped = filled(rng)
    dropped.drop_before(0, 150)
    assert copy.deepcopy(dropped).first_tokens == dropped.first_tokens == [128]
    layers = attn.Cache(heads=2, dim=64, max_tokens=64, layers=2, device="cpu")
    layers.reserve([0], [1])
    with pytest.raises(attn.ShapeError, match="step"):
        copy.deepcopy(layers)


def test_a_stream_that_drops_its_middle_goes_on(rng):
    """Kills ranges that go to the wrong sequence, and counts that are not those of the tokens that went."""
    k, v, q = rows(rng, 1100, 2, 64), rows(rng, 1100, 2, 64), rows(rng, 1, 8, 64)
    cache, left = (attn.Cache("int4", heads=2, dim=64, max_tokens=1024, sequences=2, device="cpu") for _ in range(2))
    cache.append(k[:1000], v[:1000], sequences=1)
    assert cache.drop_range(1, 64, 700) == 576 and cache.lens == [0, 424]
    cache.append(k[1000:], v[1000:], sequences=1)
    kept = numpy.r_[0:64, 640:1000]
    left.append(k[kept], v[kept], sequences=1)
    left.append(k[1000:], v[1000:], sequences=1)
    numpy.testing.assert_array_equal(cache.attend(q, sequences=[1]), left.attend(q, sequences=[1]))
    with pytest.raises(attn.ParameterError, match="first token to drop"):
        cache.drop_range(1, 0, 300)


def test_keys_with_outlier_channels_are_warned_of_once(rng):
    """Kills a warning of biases that the centres take off, none of those that turn too fast, and one at each append."""
    k, v = rows(rng, 300, 2, 64), rows(rng, 300, 2, 64)
    slow, fast = k.copy(), k.copy()
    slow[..., 7] += 100
    fast[..., 7], fast[..., 39] = 100 * numpy.cos(numpy.arange(300))[:, None], 100 * numpy.sin(numpy.arange(300))[:, None]
    for keys, bound in ((k, (1, 4)), (slow, (1, 4)), (fast, (100, 1e4))):
        cache = attn.Cache("int4", heads=2, dim=64, max_tokens=1024, device="cpu")
        cache.append(keys[:100], v[:100])
        assert cache.stats().key_outliers is None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cache.append(keys[100:], v[100:])
            cache.append(keys, v)
        assert bound[0] < cache.stats().key_outliers < bound[1]
        assert len(said) == (keys is fast), [str(warning.message) for warning in said]
        if said:
            assert said[0].category is RuntimeWarning and "outlier channels" in str(said[0].message) and "bf16" in str(said[0].message)


@pytest.mark.parametrize("format", ["int8", "int8/int4", "int4"])
def test_centres_take_a_bias_off_the_keys(rng, format):
    """Kills options that do not reach the cache, and exports, images and dequantize that lose the centres."""
    k, v, q = rows(rng, 300, 2, 64), rows(rng, 300, 2, 64), rows(rng, 2, 8, 64)
    k[..., ::3] += 30
    images, errors = [], []
    for centres in (False, True):
        cache = attn.Cache(format, heads=2, dim=64, max_tokens=512, sequences=2, centres=centres, device="cpu")
        cache.append(k, v)
        out, lse = cache.attend(q, return_lse=True)
        exported = cache.export()
        out_64, lse_64 = expected(q, *exported)
        if centres:
            # The query's byte meets small keys; without centres it meets the bias.
            assert numpy.abs(out - out_64).max() < 3e-2 and numpy.abs(lse - lse_64).max() < 5e-2
        errors.append(numpy.abs(exported[0] - k).mean())
        images.append(cache.save())
        assert images[-1].centres is centres
        for a, b in zip(attn.dequantize(images[-1]), exported):
            numpy.testing.assert_array_equal(a, b)
        cache.restore(1, images[-1])
        assert cache.save(1) == images[-1] == attn.SequenceImage(images[-1].data)
        copied = copy.deepcopy(cache)
        numpy.testing.assert_array_equal(copied.attend(q, sequences=[1]), out)
    assert errors[1] * 4 < errors[0], errors
    # What a cache does that is not told.
    default = attn.Cache(format, heads=2, dim=64, max_tokens=512, device="cpu")
    assert default.centres and not attn.Cache("fp8", heads=2, dim=64, max_tokens=64, k_scales=[1.0] * 2, v_scales=[1.0] * 2, device="cpu").centres
    default.append(k, v)
    assert default.save() == images[1]
    assert len(images[1].pages) == images[1].num_pages == len(images[0].pages)
    with pytest.raises(attn.ShapeError):
        cache.free(1)
        cache.restore(1, images[0])


def test_numbers_beyond_the_range_of_a_format_are_counted_and_told_once():
    ones = numpy.ones((3, 2, 64), "f")
    cache = attn.Cache("fp8/int8", heads=2, dim=64, max_tokens=64, layers=2, k_scales=[0.01, 1.0], device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.reserve([0], [3])
        for layer in range(2):
            cache.write(layer, 4 * ones, 1e6 * ones)
    assert cache.stats().saturated == 0
    cache.reserve([0], [3])
    # The first head of K ends at 4.48, and its numbers are told where they are written.
    with pytest.warns(RuntimeWarning, match="attn.Cache: 192 numbers of K or V beyond the range of fp8/int8.*raise k_scales") as told:
        cache.write(1, 5 * ones, ones)
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write(0, 5 * ones, ones)
        copied = copy.deepcopy(cache)
        copied.reserve([0], [3])
        copied.write(0, 5 * ones, ones)
    assert cache.stats().saturated == 2 * 192 and copied.stats().saturated == 3 * 192
    assert cache.stats() == dataclasses.replace(copied.stats(), saturated=384, tokens=6)
    # A warning that a filter makes an error leaves the tokens where they are.
    f16 = attn.Cache("f16", heads=2, dim=64, max_tokens=64, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="384 numbers.*f16 stored as its end; take a format"):
            f16.append(65520 * ones, ones)
    assert f16.lens == [3] and f16.stats().saturated == 384


def test_pages_run_out_without_a_trace(rng):
    cache = attn.Cache(heads=1, dim=64, max_tokens=0, pages=2, sequences=2, device="cpu")
    k = rows(rng, 100, 1, 64)
    cache.append(k, k)
    before = cache.save()
    assert cache.pages_needed([0, 1], [29, 1]) == 2
    with pytest.raises(attn.CacheFullError, match="free a sequence, or make a cache of more `pages`") as error:
        cache.append(k[:30], k[:30], sequences=[0, 1], tokens=[29, 1])
    assert isinstance(error.value, RuntimeError) and isinstance(error.value, attn.AttnError)
    assert cache.lens == [100, 0] and cache.save() == before


@pytest.mark.parametrize(
    "error, call",
    [
        (attn.SequenceError, lambda c, x: c.append(x, x, sequences=5)),
        (attn.SequenceError, lambda c, x: c.attend(x, sequences=[1])),
        (attn.SequenceError, lambda c, x: c.export(1)),
        (attn.SequenceError, lambda c, x: c.free(1 << 40)),
        (attn.ParameterError, lambda c, x: c.free(-1)),
        (attn.ParameterError, lambda c, x: c.free(1 << 80)),
        (attn.ParameterError, lambda c, x: c.free(True)),
        (attn.ParameterError, lambda c, x: c.free(0.0)),
        (attn.ParameterError, lambda c, x: c.truncate(0, 201)),
        (attn.ParameterError, lambda c, x: c.fork(0, 0)),
        (attn.ParameterError, lambda c, x: c.append(x, x, sequences=[0, 0], tokens=[0, 1])),
        (attn.ParameterError, lambda c, x: c.append(x, x, sequences=[0, 0])),
        (attn.ShapeError, lambda c, x: c.append(x, x[:, :1])),
        (attn.ShapeError, lambda c, x: c.append(x[:, :1], x[:, :1])),
        (attn.ShapeError, lambda c, x: c.append(x[..., :32], x[..., :32])),
        (attn.ShapeError, lambda c, x: c.append(x[0], x[0])),
        (attn.ShapeError, lambda c, x: c.append(x, x, sequences=[0], tokens=[2])),
        (attn.ShapeError, lambda c, x: c.append(x, x, sequences=[0], tokens=[1, 0])),
        (attn.ShapeError, lambda c, x: c.append(x.astype("float64"), x.astype("float64"))),
        (attn.ShapeError, lambda c, x: c.append(x.astype("int32"), x.astype("int32"))),
        (attn.ShapeError, lambda c, x: c.append([[["a"]]], [[["a"]]])),
        (attn.ShapeError, lambda c, x: c.append(None, None)),
        (attn.ShapeError, lambda c, x: c.attend(x[:, :, :32])),
        (attn.ShapeError, lambda c, x: c.attend(x, q_lens=[2])),
        (attn.ParameterError, lambda c, x: c.attend(numpy.zeros((1, 3, 64), "f"))),
        (attn.ParameterError, lambda c, x: c.attend(x, scale=float("nan"))),
        (attn.ParameterError, lambda c, x: c.attend(x, softcap=-1)),
        (attn.ParameterError, lambda c, x: c.attend(x, window_left=-1)),
        (attn.ShapeError, lambda c, x: c.attend(x, sinks=[1.0])),
        (attn.ParameterError, lambda c, x: c.attend(x, sinks=[1e9, 0])),
        (attn.ParameterError, lambda c, x: c.attend(x, sinks="ab")),
        (attn.NumberError, lambda c, x: c.append(x * numpy.nan, x)),
        (attn.NumberError, lambda c, x: c.append(x, x * numpy.inf)),
        (attn.NumberError, lambda c, x: c.attend(x * numpy.nan)),
        (attn.NumberError, lambda c, x: c.attend(numpy.full((1, 2, 64), 3e38, "f"), scale=1e10)),
    ],
)
def test_refusals_change_nothing(rng, error, call):
    cache = filled(rng)
    before, stats, x = cache.save(), cache.stats(), rows(rng, 1, 2, 64)
    with pytest.raises(error) as raised:
        call(cache, x)
    assert len(str(raised.value)) > 20
    assert cache.save() == before and cache.stats() == stats


@pytest.mark.parametrize(
    "error, options",
    [
        (attn.ParameterError, dict(format="int5")),
        (attn.ParameterError, dict(format=8)),
        (attn.ParameterError, dict(dim=72)),
        (attn.ParameterError, dict(dim=0)),
        (attn.ParameterError, dict(heads=0)),
        (attn.ParameterError, dict(heads=1 << 62)),
        (attn.ParameterError, dict(q_heads=258)),
        (attn.ParameterError, dict(q_heads=3)),
        (attn.ParameterError, dict(q_heads=0)),
        (attn.ParameterError, dict(page_size=8)),
        (attn.ParameterError, dict(page_size=1 << 62)),
        (attn.ParameterError, dict(max_tokens=-1)),
        (attn.ParameterError, dict(max_tokens=1 << 62)),
        (attn.ParameterError, dict(sequences=1 << 40)),
        (attn.ParameterError, dict(pages=1 << 40)),
        (attn.ParameterError, dict(device="cpu:1")),
        (attn.ParameterError, dict(device="gpu")),
        (attn.ShapeError, dict(format="fp8", k_scales=[1.0] * 3, v_scales=[1.0] * 2)),
        (attn.ParameterError, dict(format="fp8", k_scales=[-1.0] * 2, v_scales=[1.0] * 2)),
        # No scale is right for all models.
        (attn.ParameterError, dict(format="fp8")),
        (attn.ParameterError, dict(format="int8-tensor", k_scales=[1.0] * 2)),
        (attn.ParameterError, dict(format="int8/fp8")),
        (attn.ShapeError, dict(format="int8/fp8", k_scales=[1.0] * 2)),
        (attn.ParameterError, dict(format="bf16", centres=True)),
        (attn.ParameterError, dict(format="int4-w0", centres=True)),
        (attn.UnsupportedError, dict(device="cuda:99")),
    ],
)
def test_caches_that_cannot_be_are_refused(error, options):
    usual = dict(heads=2, dim=64, max_tokens=64, device="cpu")
    with pytest.raises(error) as raised:
        attn.Cache(**{**usual, **options})
    assert isinstance(raised.value, attn.AttnError) and len(str(raised.value)) > 20


def test_empty_calls_are_calls(rng):
    cache = filled(rng, tokens=0)
    empty = rows(rng, 0, 2, 64)
    cache.append(empty, empty)
    assert cache.attend(empty).shape == (0, 2, 64)
    out, lse = cache.attend(rows(rng, 1, 2, 64), return_lse=True)
    assert (out == 0).all() and (lse == -numpy.inf).all()
    k, v = cache.export()
    assert k.shape == v.shape == (0, 2, 64)


def test_quantize_is_what_a_cache_stores(rng):
    k, v = rows(rng, 100, 2, 64), rows(rng, 100, 2, 64)
    for format, bound in (("int8", 0.03), ("int4-g4", 0.35), ("bf16", 0.02)):
        image = attn.quantize(k, v, format)
        for own, of in zip(attn.dequantize(image), (k, v)):
            assert 0 < numpy.abs(own - of).max() < bound * 2
    cache = attn.Cache("int8", heads=2, dim=64, max_tokens=100, device="cpu")
    cache.append(k, v)
    assert cache.save() == attn.quantize(k, v, "int8")


def test_devices_say_what_is_here_and_why_the_others_are_not():
    devices = {device.backend: device for device in attn.devices()}
    assert set(devices) == {"cuda", "wgpu", "cpu"}
    assert devices["cpu"].absent is None and devices["cpu"].name
    for device in devices.values():
        assert (device.name is None) == (device.absent is not None)


def test_a_backend_that_was_named_is_never_replaced(monkeypatch):
    options = dict(heads=1, dim=64, max_tokens=64)
    monkeypatch.setenv("ATTN_BACKEND", "cpu")
    assert attn.Cache(**options).device == "cpu"
    monkeypatch.setenv("ATTN_BACKEND", "CPU")
    with pytest.raises(attn.ParameterError, match="CPU"):
        attn.Cache(**options)
    # What the call says comes first.
    assert attn.Cache(**options, device="cpu").device == "cpu"


def test_the_extension_is_as_its_stub_says():
    import ast
    import importlib.util
    import pathlib

    from attn import _attn

    stub = pathlib.Path(importlib.util.find_spec("attn").origin).parent / "_attn.pyi"
    tree = ast.parse(stub.read_text())
    named = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            named[node.name] = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            named[node.name] = set()
        elif isinstance(node, ast.AnnAssign):
            named[node.target.id] = set()
    own = {name for name in dir(_attn) if not name.startswith("__")}
    assert own <= set(named), own - set(named)
    for name in own:
        members = {m for m in dir(getattr(_attn, name)) if not m.startswith("__")} if named[name] else set()
        assert members == {m for m in named[name] if not m.startswith("__")}, name


def test_every_class_on_the_page_of_errors_is_here():
    page = pathlib.Path(__file__).parents[3] / "docs" / "errors.md"
    if not page.exists():
        pytest.skip("the package's source alone, without docs/errors.md")
    named = set(re.findall(r"`attn\.(\w+)`", page.read_text()))
    assert len(named) == 8
    assert all(issubclass(getattr(attn, name), attn.AttnError) for name in named)


@pytest.mark.parametrize("format, page_size, centres", [("int8", 64, True), ("int4-g1", 16, None), ("bf16", 32, None), ("int4", 64, None)])
def test_selected_pages_have_the_bits_of_their_tokens_alone(rng, format, page_size, centres):
    lens = [200, 333]
    cache = attn.Cache(format, heads=2, dim=64, max_tokens=400, sequences=2, page_size=page_size, centres=centres, device="cpu")
    k, v = [[rows(rng, n, 2, 64) for n in lens] for _ in "kv"]
    for i in range(2):
        cache.append(k[i], v[i], sequences=i)
    # In any order; of unlike numbers, filled up.
    last = (lens[1] - 1) // page_size
    pages = numpy.array([[[2, 0, -1, -1], [0, -1, -1, -1]], [[0, 1, -1, -1], [last, 0, 2, -1]]])
    if format == "int4":
        # Its window: the sequence's first tile, and its newest pages.
        pages = numpy.array([[[3, 0, 2, -1], [2, 0, 3, 1]], [[0, last - 1, last, -1], [last, 0, 2, last - 1]]])
    q = rows(rng, 2, 8, 64)
    out, lse = cache.attend(q, sequences=[1, 0], q_lens=[1, 1], pages=pages[::-1], softcap=20.0, return_lse=True)
    for i, sequence in enumerate([1, 0]):
        for head in range(2):
            own = sorted(page for page in pages[sequence, head] if page >= 0)
            at = [t for page in own for t in range(page * page_size, min((page + 1) * page_size, lens[sequence]))]
            alone = attn.Cache(format, heads=1, dim=64, max_tokens=400, page_size=page_size, centres=centres, device="cpu")
            alone.append(k[sequence][at, head : head + 1], v[sequence][at, head : head + 1])
            group = slice(4 * head, 4 * head + 4)
            wanted, wanted_lse = alone.attend(q[i : i + 1, group], softcap=20.0, return_lse=True)
            assert (out[i, group] == wanted[0]).all() and (lse[i, group] == wanted_lse[0]).all()


def test_pages_that_cannot_be_selected_are_refused(rng):
    cache = filled(rng, "int8")
    heads, tokens = cache.heads, cache.lens[0]
    q = rows(rng, 1, 8, 64)
    chosen = [[[0]] * heads]
    whole = cache.attend(q, sequences=0)
    assert (cache.attend(q, sequences=0, pages=[[list(range(-(-tokens // 64)))] * heads]) == whole).all()
    for wrong, options, said in [
        ([[[0]]] * heads, {}, "needed: whole numbers"),
        ([[[0, 0]] * heads], {}, "ascending, each once"),
        ([[[-2]] * heads], {}, "a whole number from 0 on"),
        ([[[0, 1 << 32]] * heads], {}, "pages of the sequence"),
        ([[[0, 1000]] * heads], {}, "the number of the sequence's pages"),
        ("all", {}, "whole numbers"),
        (chosen, {"window_left": 5}, "window_left"),
        (chosen, {"sinks": [0.0] * 8}, "sinks"),
    ]:
        with pytest.raises(attn.AttnError, match=re.escape(said)):
            cache.attend(q, sequences=0, pages=wrong, **options)
    with pytest.raises(attn.ParameterError, match="one query token"):
        cache.attend(rows(rng, 2, 8, 64), sequences=0, pages=chosen)
    with pytest.raises(attn.ParameterError, match="newest pages of the sequence"):
        filled(rng, "int4").attend(q, sequences=0, pages=[[[0, 1]] * heads])
    assert filled(rng, "fp8").attend(q, sequences=0, pages=chosen).shape == q.shape
    unlike = attn.Cache("fp8", heads=2, dim=64, max_tokens=64, k_scales=[1.0, 0.5], v_scales=[1.0, 1.0], device="cpu")
    with pytest.raises(attn.ParameterError, match="differ from KV head to KV head"):
        unlike.attend(q, sequences=0, pages=[[[], []]])
