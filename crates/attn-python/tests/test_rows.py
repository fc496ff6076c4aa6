"""Rows that `attn.Cache` takes and gives, over numpy on the CPU: types, strides, batches, places for results."""

import attn
import numpy
import pytest
from conftest import filled, rows


def test_four_dims_are_a_batch(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=128, sequences=3, device="cpu")
    k, v, q = (rows(rng, 3, 5, n, 64) for n in (2, 2, 4))
    cache.append(k, v)
    assert cache.lens == [5, 5, 5]
    out, lse = cache.attend(q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (3, 5, 4)
    for b in range(3):
        assert (cache.attend(q[b], sequences=b) == out[b]).all()


def test_16_bit_rows_are_taken_and_given(rng):
    k, v, q = (rows(rng, 20, n, 64).astype("float16") for n in (2, 2, 4))
    narrow = attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu")
    narrow.append(k, v)
    wide = attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu")
    wide.append(k.astype("float32"), v.astype("float32"))
    assert narrow.save().pages == wide.save().pages
    out = narrow.attend(q)
    assert out.dtype == numpy.float16
    assert (out == wide.attend(q.astype("float32")).astype("float16")).all()


def test_arrays_that_cannot_be_read_in_place_are_copied(rng):
    fused = rows(rng, 20, 6, 64)
    k, v = fused[::-1, :2], fused[:, 2:4, ::-1]
    k_only = numpy.broadcast_to(k[0], k.shape)
    k_only.flags.writeable = False
    a = attn.Cache(heads=2, dim=64, max_tokens=64, sequences=2, device="cpu")
    a.append(k, v)
    a.append(k_only, v, sequences=1)
    b = attn.Cache(heads=2, dim=64, max_tokens=64, sequences=2, device="cpu")
    b.append(k.copy(), v.copy())
    b.append(k_only.copy(), v.copy(), sequences=1)
    assert a.save(0) == b.save(0) and a.save(1) == b.save(1)
    q = rows(rng, 20, 4, 64)
    assert (a.attend(q[::-2], q_lens=[10]) == b.attend(q[::-2].copy())).all()


def spread(x, strides, gap=numpy.nan):
    """A view of x's shape and values at `strides` (in elements, the last is 1) of a larger array full of `gap`, and that array."""
    size = sum((n - 1) * s for n, s in zip(x.shape, strides)) + 1 if x.size else 0
    memory = numpy.full(size, gap, x.dtype)
    view = numpy.lib.stride_tricks.as_strided(memory, x.shape, [s * x.itemsize for s in strides])
    view[...] = x
    return view, memory


# Of [tokens, heads, dim], with 5 tokens of 4 heads of 64: fused, heads first, heads apart, heads first with gaps.
STRIDES = [(704, 64, 1), (64, 320, 1), (400, 80, 1), (65, 333, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("strides", STRIDES)
def test_rows_at_strides_are_rows_side_by_side(rng, dtype, strides, monkeypatch):
    k, v, q = (rows(rng, 5, 4, 64).astype(dtype) for _ in range(3))
    near = attn.Cache(heads=4, dim=64, max_tokens=64, device="cpu")
    near.append(k, v)
    want, want_lse = near.attend(q, return_lse=True)
    far = attn.Cache(heads=4, dim=64, max_tokens=64, device="cpu")
    (far_k, _), (far_v, _), (far_q, _) = (spread(x, strides) for x in (k, v, q))
    out, memory = spread(numpy.zeros_like(q), strides, gap=7)
    expected = spread(want, strides, gap=7)[1]
    # No packed copy is made on the way.
    for name in ("array", "ascontiguousarray", "copy"):
        monkeypatch.delattr(numpy, name)
    far.append(far_k, far_v)
    result, lse = far.attend(far_q, out=out, return_lse=True)
    monkeypatch.undo()
    assert result is out and far.save() == near.save()
    assert (memory == expected).all() and (lse == want_lse).all()


def test_a_transposed_batch_is_taken_as_it_lies(rng):
    shape = (3, 5, 2, 64)
    k, v, q = (rows(rng, *shape).transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for _ in range(3))
    far, near = (attn.Cache(heads=2, dim=64, max_tokens=64, sequences=3, device="cpu") for _ in range(2))
    far.append(k, v)
    near.append(*map(numpy.ascontiguousarray, (k, v)))
    assert all(far.save(b) == near.save(b) for b in range(3))
    want = near.attend(numpy.ascontiguousarray(q))
    out = numpy.zeros((3, 2, 5, 64), "f").transpose(0, 2, 1, 3)
    assert far.attend(q, out=out) is out
    assert (out == want).all() and (far.attend(q) == want).all()


def test_outputs_may_lie_between_the_queries_or_in_their_place(rng):
    cache, q = filled(rng), rows(rng, 3, 4, 64)
    want = cache.attend(q)
    fused = numpy.zeros((3, 8, 64), "f")
    fused[:, :4] = q
    cache.attend(fused[:, :4], out=fused[:, 4:])
    assert (fused[:, :4] == q).all() and (fused[:, 4:] == want).all()
    cache.attend(fused[:, :4], out=fused[:, :4])
    assert (fused[:, :4] == want).all() and (fused[:, 4:] == want).all()


def test_no_tokens_are_taken_in_any_shape(rng):
    cache = filled(rng, sequences=2)
    before = cache.save()
    fused = rows(rng, 5, 8, 64)
    for none in (fused[:0, :2], fused[:0, 2:4], numpy.empty((0, 2, 64), "f"), numpy.empty((2, 0, 64), "f").transpose(1, 0, 2)):
        cache.append(none, none)
    cache.append(numpy.empty((2, 0, 2, 64), "f"), fused[None, :0, :2].repeat(2, 0))
    assert cache.save() == before
    assert cache.attend(fused[:0]).shape == (0, 8, 64)
    assert cache.attend(numpy.empty((2, 0, 8, 64), "f")).shape == (2, 0, 8, 64)


def test_outputs_whose_rows_overlap_or_lie_backwards_are_refused(rng):
    cache, q = filled(rng), rows(rng, 3, 4, 64)
    memory = numpy.full(4096, 9, "f")
    view = numpy.lib.stride_tricks.as_strided
    with pytest.raises(attn.ParameterError, match="do not overlap"):
        cache.attend(q, out=view(memory, q.shape, (4 * 64, 4 * 96, 4)))
    for wrong in (memory[:768].reshape(q.shape)[::-1], memory[:768].reshape(3, 64, 4).transpose(0, 2, 1)):
        with pytest.raises(attn.ShapeError, match="strides"):
            cache.attend(q, out=wrong)
    assert (memory == 9).all()


def test_results_go_where_the_caller_says(rng):
    cache, q = filled(rng), rows(rng, 2, 4, 64)
    out = numpy.full_like(q, 9)
    assert cache.attend(q, out=out) is out
    assert (out == cache.attend(q)).all()
    for wrong in (out[:1], out.astype("float64"), out[:, ::2], out.tolist()):
        with pytest.raises(attn.ShapeError):
            cache.attend(q, out=wrong)
    out.flags.writeable = False
    with pytest.raises(attn.ShapeError, match="cannot be written"):
        cache.attend(q, out=out)
