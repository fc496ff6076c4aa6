"""Every argument of every public function with values that a caller may pass by mistake: each means what it says, or is refused by an `AttnError` that
changes nothing. No other exception, and no value that is taken for another."""

import array
import copy
import datetime
import decimal
import threading

import attn
import numpy
import pytest
from conftest import rows

try:
    import torch
except ImportError:
    torch = None


class Hostile:
    """Raises whatever it is asked."""

    def __getattr__(self, name):
        raise RuntimeError(f"hostile {name}")

    def __index__(self):
        raise RuntimeError("hostile index")

    def __float__(self):
        raise RuntimeError("hostile float")

    def __repr__(self):
        raise RuntimeError("hostile repr")


class Lengthless:
    """Has all the protocols that are asked for, and keeps none."""

    shape, dtype, tolist = "shape", None, None

    def __index__(self):
        return "one"

    def __len__(self):
        return 1 << 70

    def __iter__(self):
        raise KeyError("no items")

    def __dlpack__(self, **_):
        return 5

    def __dlpack_device__(self):
        return (1, 0)


# What an argument can be.
COUNT, COUNTS, NUMBER, NUMBERS, FLAG, FORMAT, DEVICE, ARITHMETIC, ROWS, IMAGE, NONE = (
    "count counts number numbers flag format device arithmetic rows image none".split()
)


def odd_values():
    """Values, and what each can be taken for."""
    ones = numpy.ones((1, 2, 64), "f")
    masked = numpy.ma.masked_array(ones, mask=ones > 0)
    values = [
        (None, [NONE]),
        (True, [FLAG]),
        (numpy.bool_(False), [FLAG]),
        (numpy.array(True), [FLAG]),
        (0, [COUNT, NUMBER]),
        (1, [COUNT, NUMBER]),
        (-1, [NUMBER]),
        (1 << 62, [COUNT, NUMBER]),
        (1 << 63, [NUMBER]),
        (1 << 80, [NUMBER]),
        (10**400, []),
        (0.5, [NUMBER]),
        (1e300, [NUMBER]),
        (float("nan"), [NUMBER]),
        (-float("inf"), [NUMBER]),
        (decimal.Decimal("0.25"), [NUMBER]),
        (1j, []),
        (numpy.int64(1), [COUNT, NUMBER]),
        (numpy.uint8(0), [COUNT, NUMBER]),
        (numpy.float32(1), [NUMBER]),
        (numpy.array(1), [COUNT, NUMBER]),
        ("", []),
        ("x", []),
        ("no", []),
        ("1", []),
        ("int8", [FORMAT]),
        ("cpu", [DEVICE]),
        ("fast", [ARITHMETIC]),
        ("\0", []),
        (b"ab", []),
        (bytearray(2), []),
        (memoryview(b"\0\1"), [COUNTS, NUMBERS]),
        ([], [COUNTS, NUMBERS, ROWS]),
        ((), [COUNTS, NUMBERS, ROWS]),
        ([0], [COUNTS, NUMBERS, ROWS]),
        ((1, 0), [COUNTS, NUMBERS, ROWS]),
        ([0.5, 1.5], [NUMBERS, ROWS]),
        ([-1], [NUMBERS, ROWS]),
        ([True], []),
        ([None], []),
        (["a"], []),
        ([[1], [2]], [NUMBERS, ROWS]),
        ([[[0.5] * 64] * 2], [ROWS]),
        ([[[[1]]]], [ROWS]),
        ([10**400], []),
        (range(2), [COUNTS, NUMBERS, ROWS]),
        (iter([0]), []),
        ({0: 1}, []),
        ({1}, []),
        (array.array("q", [1]), [COUNTS, NUMBERS, ROWS]),
        (numpy.array([1, 0]), [COUNTS, NUMBERS, ROWS]),
        (numpy.array([0], "uint8"), [COUNTS, NUMBERS, ROWS]),
        (numpy.array([0.5, 2], "f"), [NUMBERS, ROWS]),
        (numpy.array([], "int64"), [COUNTS, NUMBERS, ROWS]),
        (numpy.array([True, False]), []),
        (numpy.array(["a"]), []),
        (numpy.array([None]), []),
        (numpy.array("2020", "datetime64"), []),
        (numpy.zeros(1, [("a", "f")]), []),
        (ones, [ROWS]),
        (ones.astype("float16"), [ROWS]),
        (ones.astype(">f4"), [ROWS]),
        (ones.astype("float64"), []),
        (ones.astype("complex64"), []),
        (ones.astype("int32"), []),
        (ones.astype("object"), []),
        (ones * numpy.nan, [ROWS]),
        (masked, []),
        (numpy.broadcast_to(ones, (3, 2, 64)), [ROWS]),
        (object(), []),
        (int, []),
        (numpy.int64, []),
        (len, []),
        (threading.Lock(), []),
        (datetime.date(2020, 1, 1), []),
        (Hostile(), []),
        (Lengthless(), []),
        (attn.quantize(ones, ones), [IMAGE]),
    ]
    if torch is not None:
        tensor = torch.ones(1, 2, 64)
        values += [
            (torch.tensor(1), [COUNT, NUMBER]),
            (torch.tensor([1, 0]), [COUNTS, NUMBERS]),
            (torch.tensor([0.5, 2]), [NUMBERS, ROWS]),
            (torch.tensor(True), [FLAG]),
            (torch.tensor([True]), []),
            (torch.tensor(1, device="meta"), []),
            (tensor, [ROWS]),
            (tensor.requires_grad_(), [ROWS]),
            (tensor.bfloat16(), [ROWS]),
            (tensor.double(), []),
            (tensor.bool(), []),
            (tensor.to(torch.complex64), []),
            (tensor.to("meta"), []),
            (tensor.detach().to_sparse(), []),
            (torch.quantize_per_tensor(tensor.detach(), 0.1, 0, torch.qint8), []),
            (torch._neg_view(tensor.detach()), [ROWS]),
            (torch.device("cpu"), [DEVICE]),
            (torch.float32, []),
        ]
    return values


def filled():
    cache = attn.Cache(heads=2, dim=64, max_tokens=256, sequences=3, device="cpu")
    x = rows(numpy.random.default_rng(1), 70, 2, 64)
    cache.append(x, x)
    cache.fork(0, 1)
    return cache


def of_layers():
    cache = attn.Cache(heads=2, dim=64, max_tokens=256, layers=2, device="cpu")
    cache.reserve([0], [1])
    return cache


X = numpy.full((1, 2, 64), 0.5, "f")
STEP = dict(
    layer=(0, [COUNT, NONE]),
    sequences=([0], [COUNT, COUNTS, NONE]),
    scale=(1.0, [NUMBER, NONE]),
    causal=(True, [FLAG]),
    softcap=(2.0, [NUMBER, NONE]),
    window_left=(5, [COUNT, NONE]),
    alibi_slopes=([0.1, 0.1], [NUMBERS, NONE]),
    q=(X, [ROWS]),
    q_lens=([1], [COUNTS, NONE]),
)
COPIES = {"fork": dict(source=(0, [COUNT]), target=(2, [COUNT]))}
CACHE = dict(
    format=("int8", [FORMAT]),
    heads=(2, [COUNT]),
    dim=(64, [COUNT]),
    max_tokens=(64, [COUNT]),
    sequences=(1, [COUNT]),
    layers=(1, [COUNT]),
    q_heads=(2, [COUNT, NONE]),
    device=("cpu", [DEVICE, NONE]),
    pages=(4, [COUNT, NONE]),
    page_size=(64, [COUNT]),
    max_q_len=(64, [COUNT]),
    checkpoints=(128, [COUNT]),
    k_scales=(None, [NUMBERS, NONE]),
    v_scales=(None, [NUMBERS, NONE]),
    centres=(False, [FLAG, NONE]),
)
METHODS = {
    "append": dict(k=(X, [ROWS]), v=(X, [ROWS]), sequences=([0], [COUNT, COUNTS, NONE]), tokens=([1], [COUNTS, NONE])),
    "attend": dict(
        STEP, sinks=([0.5, 0.5], [NUMBERS, NONE]), arithmetic=("exact", [ARITHMETIC]), out=(numpy.empty_like(X), [ROWS, NONE]), return_lse=(True, [FLAG])
    ),
    "attend_spans": dict(STEP, tokens_before=([0], [COUNTS, NONE]), tokens_after=([0], [COUNTS, NONE]), spans=(1, [COUNT, NONE])),
    "truncate": dict(sequence=(0, [COUNT]), tokens=(60, [COUNT])),
    "longest_prefix": dict(sequence=(0, [COUNT]), tokens=(60, [COUNT])),
    "drop_before": dict(sequence=(0, [COUNT]), token=(64, [COUNT])),
    "drop_range": dict(sequence=(0, [COUNT]), start=(64, [COUNT]), end=(64, [COUNT])),
    "shard_centres": dict(sequence=(0, [COUNT])),
    "add_sequences": dict(sequences=(1, [COUNT])),
    "add_pages": dict(pages=(1, [COUNT])),
    "free": dict(sequence=(0, [COUNT])),
    "pages_needed": dict(sequences=([0], [COUNT, COUNTS]), tokens=([5], [COUNT, COUNTS])),
    "pages_for": dict(tokens=(5, [COUNT])),
    "export": dict(sequence=(0, [COUNT]), layer=(0, [COUNT, NONE])),
    "save": dict(sequence=(0, [COUNT])),
    "restore": dict(sequence=(2, [COUNT]), image=(attn.quantize(X, X), [IMAGE])),
    **COPIES,
}
LAYERS = {
    "reserve": dict(sequences=([0], [COUNT, COUNTS]), tokens=([1], [COUNT, COUNTS])),
    "write": dict(layer=(0, [COUNT]), k=(X, [ROWS]), v=(X, [ROWS])),
}
STATES = numpy.ones((1, 1, 2, 64), "f")
FUNCTIONS = {
    "Cache": CACHE,
    "quantize": dict(k=(X, [ROWS]), v=(X, [ROWS]), format=("int8", [FORMAT]), page_size=(64, [COUNT])),
    "dequantize": dict(image=(attn.quantize(X, X), [IMAGE])),
    "merge_spans": dict(
        format=("int8", [FORMAT]),
        max_sums=(STATES[..., :2], [ROWS]),
        o=(STATES, [ROWS]),
        kv_heads=(2, [COUNT]),
        sinks=([0.5, 0.5], [NUMBERS, NONE]),
        v_scales=(None, [NUMBERS, NONE]),
    ),
    "SequenceImage": dict(data=(attn.quantize(X, X).data, [])),
}
CASES = [(made, name, argument) for made, calls in ((filled, METHODS), (of_layers, LAYERS), (None, FUNCTIONS)) for name in calls for argument in calls[name]]


def books(cache):
    """All that a refused call must leave as it was."""
    if cache is None:
        return None
    saved = [] if cache.open_step else [cache.save(sequence).data for sequence in range(cache.sequences)]
    return cache.lens, cache.first_tokens, cache.stats(), cache.open_step, saved


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made, name, argument", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_odd_arguments_mean_what_they_say_or_are_refused(made, name, argument):
    arguments = {**METHODS, **LAYERS, **FUNCTIONS}[name]
    usual = {key: value for key, (value, _) in arguments.items()}
    allowed = set(arguments[argument][1])
    cache = None if made is None else made()
    before = books(cache)
    for value, kinds in odd_values():
        call = getattr(attn if cache is None else cache, name)
        given = {**usual, argument: value}
        # A new output for each call, which the call may write.
        given = {key: copy.copy(x) if key == "out" and isinstance(x, numpy.ndarray) else x for key, x in given.items()}
        shown = f"{name}({argument}={'hostile' if isinstance(value, Hostile) else repr(value)[:80]})"
        try:
            call(**given)
        except attn.AttnError as error:
            assert len(str(error)) > 20, f"{shown}: {error}"
            assert books(cache) == before, f"{shown} is refused and has changed the cache"
            continue
        except BaseException as error:
            pytest.fail(f"{shown} raises {type(error).__name__}: {error}")
        assert allowed & set(kinds), f"{shown} is taken"
        if cache is not None:
            cache = made()


def test_numbers_of_other_types_are_the_numbers_that_they_hold():
    q = rows(numpy.random.default_rng(2), 2, 2, 64)
    kinds = [list, tuple, numpy.array, lambda x: array.array("q", x)] + ([torch.tensor] if torch is not None else [])
    for kind in kinds:
        cache = filled()
        cache.append(q, q, sequences=kind([2, 0]), tokens=kind([1, 1]))
        assert cache.lens == [71, 70, 1]
        want = cache.attend(q, sequences=[2, 0], q_lens=[1, 1])
        assert (cache.attend(q, sequences=kind([2, 0]), q_lens=kind([1, 1])) == want).all()
        assert cache.pages_needed(kind([0]), kind([64])) == 1
    for one in (0, numpy.int32(0), numpy.array(0)) + ((torch.tensor(0),) if torch is not None else ()):
        cache = filled()
        want = cache.attend(q)
        assert (cache.attend(q, sequences=one, layer=one) == want).all()
        cache.truncate(one, one)
        assert cache.lens == [0, 70, 0]
    cache = filled()
    for scale in (numpy.float32(0.5), numpy.array(0.5), decimal.Decimal("0.5")):
        assert (cache.attend(q, scale=scale) == cache.attend(q, scale=0.5)).all()
    assert (cache.attend(q, causal=numpy.bool_(False)) == cache.attend(q, causal=False)).all()
    assert (cache.attend(q, causal=False) != cache.attend(q)).any()
