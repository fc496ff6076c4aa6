"""Decoding in vLLM over each kind of KV cache: time of a step, tokens per second, prompt tokens per second, room, and the first request after the start.

    python vllm_speed.py --context 1024,8192,32768 --batch 1,16,64
    VLLM_TARGET_DEVICE=cpu python vllm_speed.py --caches bf16,attn_int8,attn_int4 --batch 1 --layers 1 --channels 512 --inner 512

A model of Llama 3 8B's layers (32 query and 8 KV heads of 128 dims, 4096 channels) with `--layers` of them and weights of no meaning. Each cache has an engine of its own, in a
process of its own. Decoding runs in full CUDA graphs, on a CPU by vLLM's CPU platform and CPU_ATTN. A step is the time from a request's first new token to its last, by the engine's clock, over the tokens between; the
median of a batch's requests, whose prompts are in vLLM's prefix cache, and the least of three batches. Mixed steps are those of new requests, one after another: the prompt of one beside
tokens of those ahead; all their tokens, prompts' and new ones, over the time of all.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

# The name here, vLLM's backend and its cache type.
CACHES = {
    "bf16": ("TRITON_ATTN", "auto"),
    "fp8": ("TRITON_ATTN", "fp8"),
    "int8_per_token_head": ("TRITON_ATTN", "int8_per_token_head"),
    "attn_bf16": ("ATTN", "auto"),
    "attn_int8": ("ATTN", "attn_int8"),
    "attn_int8_int4": ("ATTN", "attn_int8_int4"),
    "attn_int4": ("ATTN", "attn_int4"),
}
WORDS = 32768
# Tokens of the first requests.
FIRST = 512
# Tokens of the prompts of mixed steps, or the context next to it, and new tokens of each.
MIXED, MIXED_TOKENS = 8192, 64


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--context", type=numbers, default=[1024, 8192, 32768], help="tokens of each prompt")
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64], help="sequences")
    parser.add_argument("--most", type=int, default=16 * 32768, help="tokens of all sequences: larger products of batch and context are left out")
    parser.add_argument("--caches", type=lambda text: text.split(","), default=list(CACHES), help=", ".join(CACHES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--channels", type=int, default=4096, help="of the model, whose attention stays as it is")
    parser.add_argument("--inner", type=int, default=14336, help="channels within the feed-forward layer")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a call")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    parser.add_argument("--backend", help="vLLM's own attention backend for its own caches, instead of TRITON_ATTN")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs")
    parser.add_argument("--limit", type=int, default=240, help="seconds of one cache")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(folder, given, longest):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": given.channels,
        "intermediate_size": given.inner,
        "num_hidden_layers": given.layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": WORDS,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


def measure(given, name):
    """The figures of one cache, a row each, as they come."""
    import random
    import statistics

    from vllm import LLM, SamplingParams

    from vllm.platforms import current_platform

    backend, dtype = CACHES[name]
    if current_platform.is_cpu() and backend != "ATTN":
        backend = "CPU_ATTN"
    if given.backend and backend != "ATTN":
        backend = given.backend
    longest = max(*given.context, FIRST) + max(2 * given.tokens, MIXED_TOKENS) + 64
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, given, longest)
        begun = time.perf_counter()
        engine = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend=backend,
            kv_cache_dtype=dtype,
            max_model_len=longest,
            max_num_seqs=max(given.batch),
            max_num_batched_tokens=8192,
            gpu_memory_utilization=given.memory,
            tensor_parallel_size=given.tensor_parallel,
            enable_prefix_caching=True,
            disable_log_stats=False,
            compilation_config=compilation(given.batch),
            seed=0,
        )
        started = time.perf_counter() - begun
        numbers = random.Random(0)

        def prompts(count, length):
            return [{"prompt_token_ids": [numbers.randrange(3, WORDS) for _ in range(length)]} for _ in range(count)]

        def timed(asked, tokens):
            begun = time.perf_counter()
            outputs = engine.generate(asked, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), use_tqdm=False)
            return time.perf_counter() - begun, outputs

        def seconds(asked, tokens):
            return timed(asked, tokens)[0]

        def step(asked):
            stats = [output.metrics for output in timed(asked, given.tokens + 1)[1]]
            return statistics.median((x.last_token_ts - x.first_token_ts) / given.tokens for x in stats)

        requests = [seconds(prompts(1, FIRST), 8) for _ in range(3)]
        cache = engine.llm_engine.vllm_config.cache_config
        room = cache.num_gpu_blocks * cache.block_size
        row(given, cache=name, start_s=started, first_ms=requests[0] * 1e3, second_ms=requests[1] * 1e3, third_ms=requests[2] * 1e3, room=room)
        known = []
        # Shorter prompts are the beginnings of longer ones, which are in the cache then.
        for length in sorted(given.context, reverse=True):
            batches = [batch for batch in sorted(given.batch) if batch * length <= min(given.most, room)]
            if not batches:
                continue
            fresh = prompts(max(max(batches) - len(known), 0), length)
            known += fresh
            asked = [{"prompt_token_ids": prompt["prompt_token_ids"][:length]} for prompt in known]
            if fresh:
                took = seconds(fresh, 1)
                row(given, cache=name, context=length, batch=len(fresh), prompt_tokens_per_s=len(fresh) * length / took)
            for batch in batches:
                least = min(step(asked[:batch]) for _ in range(3))
                row(given, cache=name, context=length, batch=batch, step_ms=least * 1e3, tokens_per_s=batch / least)
        length = min(given.context, key=lambda length: abs(length - MIXED))
        count = min(16, max(given.batch), room // (length + MIXED_TOKENS))
        took = seconds(prompts(count, length), MIXED_TOKENS)
        row(given, cache=name, mixed_context=length, mixed_batch=count, mixed_tokens_per_s=count * (length + MIXED_TOKENS) / took)


def compilation(batches):
    return {"custom_ops": ["none"], "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(set(batches))}


def row(given, **figures):
    line = json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()})
    print(line, flush=True)
    if given.json:
        with open(given.json, "a") as file:
            file.write(line + "\n")


def table(rows, caches):
    """Steps in ms, and how many times as fast as the first cache's."""
    steps = {(r["context"], r["batch"], r["cache"]): r["step_ms"] for r in rows if "step_ms" in r}
    print("| context | batch | " + " | ".join(f"{name}: ms" for name in caches) + " |")
    for context, batch in sorted({key[:2] for key in steps}):
        own = [steps.get((context, batch, name)) for name in caches]
        print(f"| {context} | {batch} | " + " | ".join("–" if x is None else f"{x:.2f} ({own[0] / x:.2f})" if own[0] else f"{x:.2f}" for x in own) + " |")
    for kind, unit in (("prompt_tokens_per_s", "prompt tokens/s"), ("mixed_tokens_per_s", "tokens/s of mixed steps"), ("room", "tokens of room"), ("start_s", "start, s"), ("first_ms", "first request, ms"), ("second_ms", "second")):
        best = {name: max((r[kind] for r in rows if r["cache"] == name and kind in r), default=None) for name in caches}
        print(f"| {unit} | | " + " | ".join("–" if x is None else f"{x:.0f}" for x in best.values()) + " |")


def main():
    given = arguments()
    if given.one:
        return measure(given, given.one)
    rows, failed = [], []
    for name in given.caches:
        command = [sys.executable, os.path.abspath(__file__), "--one", name, *sys.argv[1:]]
        # With the engine's processes, which would keep the GPU's memory.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as ran:
            try:
                said, errors = ran.communicate(timeout=given.limit)
                status = ran.returncode
            except subprocess.TimeoutExpired:
                os.killpg(ran.pid, signal.SIGKILL)
                said, errors = ran.communicate()
                errors, status = f"{errors}\ntook more than {given.limit} s", 124
        rows += [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        if status:
            failed.append(name)
            # What an engine's process dies of is in what it logs, far ahead of the end.
            causes = dict.fromkeys(line.strip()[-400:] for line in (said + errors).splitlines() if "Error" in line)
            print(f"{name}: status {status}:", *list(causes)[:8], errors[-1500:], sep="\n", flush=True)
    table(rows, given.caches)
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}")


if __name__ == "__main__":
    main()
