"""Calls on a GPU beside a library that has a current device of its own: torch."""

import ctypes
import gc
import threading

import attn
import pytest
from conftest import rows
from cuda_device import needs_gpu, torch  # noqa: F401
from test_cuda_plan import plan_of


def current_context():
    """The driver's context of this thread, which torch takes for its current device."""
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def use_a_cache_and_a_plan(rng, device):
    """Calls of each kind, over one sequence's tokens; their results on the host."""
    import attn.torch

    k, v, q = (torch.from_numpy(rows(rng, n, heads, 128)).to(device) for n, heads in ((70, 2), (70, 2), (1, 8)))
    cache = attn.Cache("int8", heads=2, dim=128, max_tokens=128, sequences=2, device=str(device), centres=False)
    cache.append(k, v, sequences=[0])
    outs = [cache.attend(q, sequences=[0])]
    cache.fork(0, 1)
    outs.append(cache.attend(q, sequences=[1]))
    cache.save(0)
    del cache
    gc.collect()
    plan = plan_of("int8", [1], device=device, max_kv_len=128)
    pool, slots = plan.new_pool(2), torch.arange(70, device=device)
    table, lens = torch.arange(2, dtype=torch.int32, device=device).view(1, 2), torch.tensor([70], dtype=torch.int32, device=device)
    plan.append_slots(k, v, pool, slots)
    outs.append(plan.attend(q, pool, table, lens)[0])
    outs.append(torch.empty_like(q))
    plan.append_slots_now(k, v, pool, slots)
    plan.attend_into(q, outs[-1], pool, table, lens)
    outs.append(plan.step(q, k[69:], v[69:], pool, table, lens))
    shard = plan_of("int8", [1], device=device, max_kv_len=128, spans=True)
    outs.append(attn.torch.merge_spans("int8", *shard.attend_spans(q, pool, table, lens), kv_heads=2)[0])
    of_rows = plan_of("bf16", [1], device=device, max_kv_len=128, rows=True)
    k_rows, v_rows = (torch.zeros(2, 64, 2, 128, dtype=torch.bfloat16, device=device) for _ in "kv")
    of_rows.attend_rows(q, k_rows, v_rows, table, lens)
    return [out.cpu() for out in outs]


def test_a_call_leaves_the_threads_device_as_it_is(rng):
    """Also a thread that has none yet."""
    found = {}

    def on_a_thread():
        before = current_context()
        cache = attn.Cache("int8", heads=2, dim=128, max_tokens=128, device="cuda")
        cache.append(*(rows(rng, 3, 2, 128) for _ in "kv"))
        found["image"] = cache.save()
        del cache
        found["contexts"] = (before, current_context())

    torch.zeros(1, device="cuda")
    current = current_context()
    outs = use_a_cache_and_a_plan(rng, torch.device("cuda", torch.cuda.current_device()))
    assert current_context() == current
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    assert found["contexts"] == (None, None) and found["image"]


def test_plans_and_caches_of_another_gpu_than_torchs_current_one(rng):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"another GPU is needed; torch sees {torch.cuda.device_count()}")
    for current in (0, 1):
        with torch.cuda.device(current):
            torch.zeros(1, device="cuda")
            context = current_context()
            outs = use_a_cache_and_a_plan(rng, torch.device("cuda", 1 - current))
            assert torch.cuda.current_device() == current and current_context() == context
            assert all(torch.equal(out, outs[0]) for out in outs[1:])
