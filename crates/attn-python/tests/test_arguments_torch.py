"""Every argument of `attn.torch` and `attn.distributed` with values that a caller may pass by mistake, as `test_arguments.py` has them: on the CPU, over a
group of one process. A plan needs a GPU; without one its arguments are looked at all the same before it is refused."""

import attn
import pytest
from conftest import require
from test_arguments import COUNT, COUNTS, FLAG, FORMAT, NONE, NUMBER, NUMBERS, ROWS, Hostile, odd_values

try:
    import torch
    import torch.distributed as dist

    REASON = None if dist.is_available() and dist.is_gloo_available() else "torch was built without gloo"
except ImportError as error:
    torch, REASON = None, str(error)

# What an argument can be, beside those of `test_arguments.py`.
TENSOR, TENSORS, GROUP, DTYPE = "tensor", "tensors", "group", "dtype"
MODIFIERS = dict(
    scale=(1.0, [NUMBER, NONE]),
    causal=(True, [FLAG]),
    softcap=(2.0, [NUMBER, NONE]),
    window_left=(5, [COUNT, NONE]),
    alibi_slopes=([0.1, 0.1], [NUMBERS, NONE]),
    sinks=([0.5, 0.5], [NUMBERS, NONE]),
)


@pytest.fixture(autouse=True, scope="module")
def group():
    if REASON is not None:
        require("torch", REASON)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _usual():
    """The calls by their names, each with the usual value of each argument, and what the argument can be."""
    x = torch.full((1, 2, 64), 0.5)
    states = torch.ones(1, 1, 2, 64)
    batch = dict(sequences=([0], [COUNT, COUNTS, NONE]))
    merge = dict(
        format=("int8", [FORMAT]),
        max_sums=(states[..., :2], [TENSOR]),
        o=(states, [TENSOR]),
        kv_heads=(2, [COUNT]),
        dtype=(None, [NONE, DTYPE]),
        sinks=([0.5, 0.5], [NUMBERS, NONE]),
        v_scales=(None, [NUMBERS, NONE]),
    )
    return {
        "torch.merge": dict(outs=(states, [TENSOR]), lses=(states[..., 0], [TENSOR])),
        "torch.merge_spans": merge,
        "torch.Plan": dict(
            MODIFIERS,
            format=("int8", [FORMAT]),
            heads=(2, [COUNT]),
            kv_heads=(2, [COUNT]),
            dim=(64, [COUNT]),
            q_lens=([1], [COUNTS]),
            max_kv_len=(64, [COUNT]),
            page_size=(64, [COUNT]),
            rows=(False, [FLAG]),
            ragged=(False, [FLAG]),
            rotary=(False, [FLAG]),
            spans=(False, [FLAG]),
            device=(None, [NONE]),
            arithmetic=("exact", ["arithmetic"]),
            k_scales=(None, [NUMBERS, NONE]),
            v_scales=(None, [NUMBERS, NONE]),
        ),
        "distributed.tokens_of_rank": dict(tokens=(5000, [COUNT]), ranks=(2, [COUNT])),
        "distributed.gathered": dict(parts=([x], [TENSORS]), group=(None, [NONE, GROUP])),
        "distributed.exchanged": dict(parts=([x], [TENSORS]), group=(None, [NONE, GROUP])),
        "distributed.merge_spans_over": dict(merge, group=(None, [NONE, GROUP]), own_heads=(False, [FLAG])),
        "distributed.ContextParallelCache": dict(
            format=("int8", [FORMAT]),
            heads=(2, [COUNT]),
            dim=(64, [COUNT]),
            max_tokens=(64, [COUNT]),
            sequences=(1, [COUNT]),
            share=(1024, [COUNT, NONE]),
            group=(None, [NONE, GROUP]),
            layers=(1, [COUNT]),
        ),
        "append": dict(batch, k=(x, [TENSOR]), v=(x, [TENSOR]), tokens=([1], [COUNTS, NONE])),
        "attend": dict(batch, **MODIFIERS, q=(x, [TENSOR]), q_lens=([1], [COUNTS, NONE]), return_lse=(True, [FLAG])),
        "truncate": dict(sequence=(0, [COUNT]), tokens=(60, [COUNT])),
        "fork": dict(source=(0, [COUNT]), target=(2, [COUNT])),
        "free": dict(sequence=(0, [COUNT])),
    }


def _cache():
    from attn.distributed import ContextParallelCache

    cache = ContextParallelCache(heads=2, dim=64, max_tokens=256, sequences=3, device="cpu")
    x = torch.ones(70, 2, 64)
    cache.append(x, x)
    return cache


def _kinds(value, kinds):
    """What a value of `odd_values` can be taken for here."""
    is_tensor = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu" and value.dtype.is_floating_point
    return [kind for kind in kinds if kind != ROWS] + [TENSOR] * is_tensor + [DTYPE] * isinstance(value, torch.dtype)


NAMES = {name: list(arguments) for name, arguments in (_usual().items() if REASON is None else [])}
CASES = [(name, argument) for name, arguments in NAMES.items() for argument in arguments] or [("torch", "absent")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, argument", CASES)
def test_odd_arguments_mean_what_they_say_or_are_refused(name, argument):
    import attn.distributed
    import attn.torch

    arguments = _usual()[name]
    usual = {key: value for key, (value, _) in arguments.items()}
    of_cache = "." not in name
    cache = _cache() if of_cache else None
    for value, kinds in odd_values():
        call = attn if cache is None else cache
        for part in name.split("."):
            call = getattr(call, part)
        shown = f"{name}({argument}={'hostile' if isinstance(value, Hostile) else repr(value)[:80]})"
        before = None if cache is None else (cache.lens, cache.cache.lens, cache.cache.stats())
        try:
            call(**{**usual, argument: value})
        except attn.AttnError as error:
            assert len(str(error)) > 20, f"{shown}: {error}"
            assert cache is None or (cache.lens, cache.cache.lens, cache.cache.stats()) == before, f"{shown} is refused and has changed the cache"
            continue
        except BaseException as error:
            pytest.fail(f"{shown} raises {type(error).__name__}: {error}")
        assert set(arguments[argument][1]) & set(_kinds(value, kinds)), f"{shown} is taken"
        cache = _cache() if of_cache else None
