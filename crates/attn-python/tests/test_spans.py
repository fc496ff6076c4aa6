"""Shards of a sequence in caches of their own, over numpy on the CPU: merged, they have the bits of one cache."""

import attn
import numpy
import pytest
from conftest import rows, static_scales

SCALES = dict(k_scales=[0.05, 0.02], v_scales=[0.02, 0.05])


def shards(format, k, v, lens, cuts, **options):
    """For each shard between two of `cuts` its cache, which has no other tokens, and how many lie ahead and follow."""
    first, first_shard = numpy.cumsum([0, *lens]), None
    for start, end in zip(cuts, cuts[1:]):
        parts = [(min(start, n), min(end, n)) for n in lens]
        cache = attn.Cache(format, heads=2, dim=64, max_tokens=max(b - a for a, b in parts), sequences=len(lens), max_q_len=200, device="cpu", **options)
        first_shard = first_shard if start else cache
        for i, (a, b) in enumerate(parts):
            if start and a < b:
                cache.begin_shard(i, start, first_shard.shard_centres(i))
            cache.append(k[first[i] + a : first[i] + b], v[first[i] + a : first[i] + b], sequences=i)
        yield cache, dict(tokens_before=[start if a < b else 0 for a, b in parts], tokens_after=[n - b for n, (_, b) in zip(lens, parts)])


@pytest.mark.parametrize("cuts", [[0, 1024, 2048, 4096], [0, 2048, 4096], [0, 1024, 1024, 4096]])
@pytest.mark.parametrize(
    "format, modifiers",
    [
        ("int8", {}),
        ("int4", {}),
        ("int8/int4", dict(causal=False)),
        ("bf16", dict(softcap=20.0)),
        ("fp8", {}),
        ("int8", dict(window_left=700, alibi_slopes=[0.01 * i for i in range(8)], scale=0.3)),
    ],
)
def test_shards_have_the_bits_of_one_cache(rng, format, modifiers, cuts):
    lens, q_lens = [2500, 1029, 700], [3, 200, 0]
    scales = SCALES if format == "fp8" else {}
    k, v, q = rows(rng, sum(lens), 2, 64), rows(rng, sum(lens), 2, 64), rows(rng, sum(q_lens), 8, 64)
    sinks = [0.5 * i - 2 for i in range(8)]
    whole = attn.Cache(format, heads=2, dim=64, max_tokens=2500, sequences=3, max_q_len=200, device="cpu", **scales)
    first = numpy.cumsum([0, *lens])
    for i in range(3):
        whole.append(k[first[i] : first[i + 1]], v[first[i] : first[i + 1]], sequences=i)
    wanted, wanted_lse = whole.attend(q, sequences=[0, 1, 2], q_lens=q_lens, sinks=sinks, return_lse=True, **modifiers)
    states = [
        cache.attend_spans(q, sequences=[0, 1, 2], q_lens=q_lens, spans=spans, **others, **modifiers)
        # As many as needed, and more.
        for (cache, others), spans in zip(shards(format, k, v, lens, cuts, **scales), (None, 3, None))
    ]
    assert states[1][0].shape == (3, 203, 8, 2) and (states[1][0][2, :, :, 0] == -numpy.inf).all()
    max_sums, o = (numpy.concatenate(x) for x in zip(*states))
    out, lse = attn.merge_spans(format, max_sums, o, kv_heads=2, sinks=sinks, v_scales=scales.get("v_scales"))
    assert (out == wanted).all() and (lse == wanted_lse).all()
    # In another order the sums round otherwise, and a shard that is missing is missed.
    out, _ = attn.merge_spans(format, max_sums[1:], o[1:], kv_heads=2, sinks=sinks, v_scales=scales.get("v_scales"))
    assert (out != wanted).any()


def test_a_layer_of_several_is_attended(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=100, layers=2, device="cpu")
    cache.reserve([0], [70])
    for layer in range(2):
        cache.write(layer, rows(rng, 70, 2, 64), rows(rng, 70, 2, 64))
    q = rows(rng, 2, 8, 64)
    for layer in range(2):
        out, _ = attn.merge_spans("int8", *cache.attend_spans(q, layer=layer), kv_heads=2)
        assert (out == cache.attend(q, layer=layer)).all()
    # Queries that do not change hands are four dims as well.
    assert cache.attend_spans(q[None], layer=0)[1].shape == (1, 2, 8, 64)


def test_what_is_no_shard_is_refused(rng):
    cache = attn.Cache(heads=2, dim=64, max_tokens=2048, sequences=2, device="cpu")
    cache.append(rows(rng, 1030, 2, 64), rows(rng, 1030, 2, 64), sequences=1)
    q = rows(rng, 1, 8, 64)
    max_sums, o = cache.attend_spans(q, sequences=1)
    assert max_sums.shape == (2, 1, 8, 2)
    for error, call in (
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=1, tokens_after=[3])),
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=1, tokens_after=[-3])),
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=0, tokens_after=[1 << 21])),
        (attn.ShapeError, lambda: cache.attend_spans(q, sequences=1, tokens_after=[0, 0])),
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=1, tokens_before=[1000])),
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=1, tokens_before=[-1024])),
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=1, tokens_before=[1 << 20])),
        (attn.ShapeError, lambda: cache.attend_spans(q, sequences=1, tokens_before=[0, 0])),
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=1, spans=1)),
        (attn.ParameterError, lambda: cache.attend_spans(q, sequences=1, spans=0)),
        (attn.SequenceError, lambda: cache.attend_spans(q, sequences=2)),
        (attn.NumberError, lambda: cache.attend_spans(q * numpy.nan, sequences=1)),
        (attn.ShapeError, lambda: attn.merge_spans("int8", max_sums[:1], o, kv_heads=2)),
        (attn.ShapeError, lambda: attn.merge_spans("int8", max_sums, o[0], kv_heads=2)),
        (attn.ParameterError, lambda: attn.merge_spans("int8", max_sums, o, kv_heads=3)),
        (attn.ParameterError, lambda: attn.merge_spans("int8", max_sums, o, kv_heads=1 << 62)),
        (attn.ParameterError, lambda: attn.merge_spans("int5", max_sums, o, kv_heads=2)),
        (attn.ShapeError, lambda: attn.merge_spans("int8", max_sums, o, kv_heads=2, sinks=[0.0])),
        (attn.ShapeError, lambda: attn.merge_spans("int8", max_sums, o, kv_heads=2, v_scales=[1.0, 1.0])),
        (attn.NumberError, lambda: attn.merge_spans("int8", max_sums * numpy.float32("nan"), o, kv_heads=2)),
    ):
        with pytest.raises(error) as refusal:
            call()
        assert len(str(refusal.value)) > 20


@pytest.mark.parametrize("format, needs", [("fp8", "fp8 stores"), ("int8/int8-tensor", "int8-tensor stores"), ("fp8/int8", None)])
def test_static_scales_of_v_are_given_or_refused(rng, format, needs):
    scales = static_scales("fp8", 2)
    k, _, v = format.partition("/")
    static = [side for side, scheme in (("k_scales", k), ("v_scales", v or k)) if scheme in ("fp8", "int8-tensor")]
    own = {side: scales[side] for side in static}
    cache = attn.Cache(format, heads=2, dim=64, max_tokens=64, device="cpu", **own)
    cache.append(rows(rng, 9, 2, 64), rows(rng, 9, 2, 64))
    q = rows(rng, 1, 8, 64)
    states = cache.attend_spans(q)
    out, _ = attn.merge_spans(format, *states, kv_heads=2, v_scales=own.get("v_scales"))
    assert (out == cache.attend(q)).all()
    if needs is None:
        with pytest.raises(attn.ShapeError, match="v_scales has 2 scales, but int8 has no static ones"):
            attn.merge_spans(format, *states, kv_heads=2, v_scales=[1.0, 1.0])
    else:
        with pytest.raises(attn.ParameterError, match=f"v_scales is missing: {needs}"):
            attn.merge_spans(format, *states, kv_heads=2)
