"""Real vLLM on a GPU, attended by the plugin. Every result of attention is near float32 and has the same bits whenever the same query comes behind the same tokens. In vLLM's
batch-invariant mode, whose products and norms do not depend on their batch either, tokens and log-probabilities have the same bits however vLLM cuts, batches, drafts, preempts
or captures steps, with either of its model runners, in this process and behind HTTP in a process that vLLM spawns.

`.ci/gpu vllm` makes the environment. `python gpu.py` runs all parts, `python gpu.py PART…` some; a planted fault (`ATTN_VLLM_FAULT=1`) must fail `formats`.
"""

import json
import os
import sys
import tempfile
import traceback

os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")

import engine
import model
from engine import prompts, run
from server import same_over_http
from shadow import Shadow

import attn.torch
import attn.vllm as plugin

# Errors of attention against float32 over the rows as they were, a row's on average and the worst; rows are bf16, and so are results.
MOST = {"attn_bf16": (0.004, 0.02), "auto": (0.004, 0.02), "attn_int8": (0.025, 0.2), "attn_int8_int4": (0.12, 0.4), "attn_int4": (0.22, 1.2)}
PLAIN = {"custom_ops": ["none"]}
GRAPHS = {"custom_ops": ["none"], "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
engine.USUAL.update(dtype="bfloat16", block_size=None, kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.05, compilation_config=PLAIN)
FOLDER = tempfile.mkdtemp()
SHADOW = Shadow()


def checkpoint(kv_heads=2, window=None):
    folder = os.path.join(FOLDER, f"{kv_heads}-{window}")
    if not os.path.exists(folder):
        model.make(folder, 128, kv_heads, window)
    return folder


def near(name, most):
    mean, worst = SHADOW.mean, SHADOW.worst
    print(f"{name}: mean error {mean:.4f}, worst {worst:.3f}", flush=True)
    assert mean < most[0] and worst < most[1], f"{name}: the error of attention is {mean}, at worst {worst}; allowed {most}"


def same(name, whole, folder, least=None, **options):
    """A run gives the answers `whole`; `least` is a counter of the engine that must not be zero."""
    label = (folder, options["kv_cache_dtype"])
    SHADOW.start(label, is_compared=False)
    answers, counters = run(name, folder, **options)
    print(f"    {SHADOW.changed} of {SHADOW.repeated} results of attention have other bits", flush=True)
    assert SHADOW.changed == 0
    assert answers == whole, f"{name}: {sum(a != b for a, b in zip(answers, whole))} of {len(whole)} requests have other bits"
    assert least is None or counters[least] > 0, f"{name}: {least} is {counters[least]}"


def first(name, folder, **options):
    """A run that others are compared with."""
    SHADOW.start((folder, options["kv_cache_dtype"]))
    return run(name, folder, **options)


def formats():
    """Every format near float32; integers also with the same bits in pieces and preempted."""
    for format, most in MOST.items():
        whole, counters = first(format, checkpoint(), kv_cache_dtype=format)
        assert counters["vllm:prefix_cache_hits"] > 0 and SHADOW.resumed > 0 and SHADOW.mixed > 0
        near(format, most)
        if "int" in format:
            same(f"{format}, preempted", whole, checkpoint(), kv_cache_dtype=format, num_gpu_blocks_override=21, least="vllm:num_preemptions")


def ways():
    """int8, however vLLM runs it."""
    int8 = dict(kv_cache_dtype="attn_int8")
    whole, _ = first("attn_int8", checkpoint(), **int8)
    same("alone", whole, checkpoint(), one_by_one=True, **int8)
    same("in chunks of 64", whole, checkpoint(), max_num_batched_tokens=64, **int8)
    same("in graphs", whole, checkpoint(), compilation_config=GRAPHS, enforce_eager=False, **int8)
    same("in graphs, alone", whole, checkpoint(), compilation_config=GRAPHS, enforce_eager=False, one_by_one=True, **int8)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # It finds log-probabilities by another kernel, which rounds otherwise.
    answers, _ = run("model runner V1", checkpoint(), **int8)
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in whole] and SHADOW.changed == 0
    same("model runner V1, drafted", answers, checkpoint(), speculative_config=DRAFTS, least="vllm:spec_decode_num_draft_tokens", **int8)
    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]


def shapes():
    """One KV head and eight, odd numbers of blocks of other sizes, windows. Blocks of fewer than 64 tokens have no centres of K, which `attn_int4` has nowhere."""
    for kv_heads, window in ((1, None), (8, None), (2, 96)):
        for format in ("attn_int8", "attn_int4"):
            name, folder = f"{format}, {kv_heads} KV heads, window {window}", checkpoint(kv_heads, window)
            block, blocks = (16, 4001) if format == "attn_int4" else (128, 501)
            whole, _ = first(name, folder, kv_cache_dtype=format, block_size=block, num_gpu_blocks_override=blocks)
            near(name, MOST[format])
            same(f"{name}, in blocks of 64", whole, folder, kv_cache_dtype=format)


def http():
    """`vllm serve` in a spawned process answers as an engine in this one."""
    folder = checkpoint()
    options = dict(kv_cache_dtype="attn_int8", compilation_config=GRAPHS, enforce_eager=False)
    SHADOW.start(is_compared=False)
    whole, _ = run("attn_int8", folder, **options)
    graphs = json.dumps(GRAPHS, separators=(",", ":"))
    same_over_http(prompts(), whole, folder, f"--kv-cache-dtype attn_int8 --dtype bfloat16 --kv-cache-memory-bytes 2147483648 --gpu-memory-utilization 0.05 --compilation-config {graphs}")


def plant_a_fault():
    usual = attn.torch.Plan.append_slots_now

    def append_slots_now(plan, k, v, pool, slots, **others):
        slots = slots.clone()
        slots[-1] = -1
        usual(plan, k, v, pool, slots, **others)

    attn.torch.Plan.append_slots_now = plugin.Plan.append_slots_now = append_slots_now


def main(names):
    if os.environ.get("ATTN_VLLM_FAULT"):
        plant_a_fault()
    failed = []
    for part in (formats, ways, shapes, http):
        if names and part.__name__ not in names:
            continue
        try:
            part()
            print(f"{part.__name__}: passed", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(part.__name__)
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
