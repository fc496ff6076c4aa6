"""Real vLLM on its CPU platform, attended by the plugin: tokens and log-probabilities have the same bits however vLLM cuts, batches, drafts or preempts, and each result is
near attention in float32. `.ci/vllm` makes the environment and the model. A planted fault (`ATTN_VLLM_FAULT=1`: the last token's slot is skipped) must fail it."""

import gc
import os
import random
import sys
import time

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

import attn
import attn.vllm as plugin
from server import same_over_http
from shadow import Shadow

# Mean errors of attention against float32 over the rows as they were.
MOST = {"attn_bf16": 0.004, "attn_int8": 0.03, "attn_int8_int4": 0.15, "attn_int4": 0.25}
USUAL = dict(
    attention_backend="ATTN",
    block_size=64,
    num_gpu_blocks_override=501,
    dtype="float32",
    compilation_config={"custom_ops": ["none"]},
    skip_tokenizer_init=True,
    enforce_eager=True,
    max_num_batched_tokens=256,
    max_num_seqs=16,
    max_model_len=1024,
    enable_prefix_caching=True,
    enable_chunked_prefill=True,
    seed=0,
    disable_log_stats=False,
)


def prompts():
    """Twenty of 1 to 600 tokens, some with 200 in common."""
    numbers = random.Random(1)
    shared = [numbers.randrange(3, 2048) for _ in range(200)]
    made = []
    for i in range(20):
        length = numbers.randint(1, 600)
        own = [numbers.randrange(3, 2048) for _ in range(length)]
        made.append({"prompt_token_ids": (shared + own)[:length] if i % 3 == 0 and length > 220 else own})
    return made


def run(name, model, one_by_one=False, **options):
    """Greedy tokens and log-probabilities of all prompts, and the engine's counters."""
    begun, engine = time.time(), None
    try:
        engine = LLM(model, **dict(USUAL, **options))
        ask = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5, detokenize=False)
        given = [[prompt] for prompt in prompts()] if one_by_one else [prompts()]
        outputs = [output for part in given for output in engine.generate(part, ask, use_tqdm=False)]
        answers = [
            (list(o.outputs[0].token_ids), [sorted((token, p.logprob) for token, p in step.items()) for step in o.outputs[0].logprobs]) for o in outputs
        ]
        counters = {x.name: getattr(x, "value", None) for x in engine.get_metrics()}
        print(f"{name}: {time.time() - begun:.1f} s", flush=True)
        return answers, counters
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def refused(reason, model, **options):
    try:
        run(reason, model, **options)
    except Exception as error:
        said = []
        while error is not None:
            said.append(str(error))
            error = error.__cause__ or error.__context__
        assert any(reason in text for text in said), said
        return
    raise AssertionError(f"an engine with {options} started")


def plant_a_fault():
    usual = attn.HostPages.append_slots

    def append_slots(pages, k, v, pool, slots, **places):
        slots = slots.clone()
        slots[-1] = -1
        usual(pages, k, v, pool, slots, **places)

    attn.HostPages.append_slots = plugin.HostPages.append_slots = append_slots


def main(model):
    refused("has no cache of torch.float32", model, kv_cache_dtype="auto")
    refused("kv_cache_dtype not supported", model, kv_cache_dtype="fp8")
    shadow = Shadow()
    if os.environ.get("ATTN_VLLM_FAULT"):
        plant_a_fault()
    kept = {}
    for format, most in MOST.items():
        shadow.start()
        whole, counters = run(format, model, kv_cache_dtype=format)
        assert counters["vllm:prefix_cache_hits"] > 0 and shadow.resumed > 0 and shadow.mixed > 0
        mean, worst = shadow.mean, shadow.worst
        assert mean < most, f"{format}: the mean error of attention is {mean}, allowed {most}"
        others = {"preempted": dict(num_gpu_blocks_override=20)}
        if format == "attn_int8":
            others["alone"] = dict(one_by_one=True)
            others["in chunks of 64"] = dict(max_num_batched_tokens=64)
            others["in blocks of 128, an odd number of them"] = dict(block_size=128, num_gpu_blocks_override=251)
        for name, change in others.items():
            answers, counters = run(f"{format}, {name}", model, **dict(dict(kv_cache_dtype=format), **change))
            assert answers == whole, (format, name)
            assert name != "preempted" or counters["vllm:num_preemptions"] > 0
        kept[format] = whole
        print(f"{format}: mean error {mean:.4f}, worst {worst:.3f}; the same bits {', '.join(others)}", flush=True)
    # Smaller blocks hold no first tile, and have no centres of K.
    for name, blocks in (("16", 2001), ("32", 1001)):
        answers, _ = run(f"attn_int8, in blocks of {name}", model, kv_cache_dtype="attn_int8", block_size=int(name), num_gpu_blocks_override=blocks)
        kept.setdefault("small", answers)
        assert answers == kept["small"] and answers != kept["attn_int8"], name
    # Last: what vLLM loads for drafts keeps its next engine in the process from starting.
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    answers, counters = run("attn_int8, drafted", model, kv_cache_dtype="attn_int8", speculative_config=drafts)
    assert answers == kept["attn_int8"] and counters["vllm:spec_decode_num_draft_tokens"] > 0
    plain = '{"custom_ops":["none"]}'
    same_over_http(prompts(), kept["attn_int8"], model, f"--kv-cache-dtype attn_int8 --dtype float32 --block-size 64 --enforce-eager --compilation-config {plain}")
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
