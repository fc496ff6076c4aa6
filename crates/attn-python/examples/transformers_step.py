"""A decode step of transformers' Llama with the shape of Llama 3 8B and random weights: milliseconds and memory, by cache.

    python transformers_step.py [--batch 1,32] [--context 2048,16384,65536] [--layers 32]
    python transformers_step.py --device cpu --tiny --batch 1,2 --context 300

Caches: transformers' DynamicCache under sdpa (bf16), `attn.transformers.QuantizedCache` in int8, int8/int4 and int4, and transformers' own
QuantizedCache (quanto, int4) where `optimum-quanto` is installed. Caches are filled with random K and V, as a prompt would; steps are eager, as
`generate` runs them. "Longest": the context at which the cache of that batch takes what weights and 6 GB leave of the GPU's memory.

quanto builds its kernel that unpacks 4 bits when it is first used, by nvcc and ninja; where that fails, or with `--quanto-kernel never`, torch's
operations unpack, which is slower, and the table says so.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from typing import Any, Callable, Dict, List, Optional

import attn.transformers
import torch
import transformers

BEGUN = time.perf_counter()
# Steps before those that count, at most.
WARM = 10
# transformers 5.24 has renamed the argument.
PAST = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
OURS = ["int8", "int8/int4", "int4"]
DEVICE = "cuda"


def config_of(layers: int, is_tiny: bool) -> Any:
    if is_tiny:
        shape = dict(vocab_size=1000, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
        return transformers.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=131072, dtype=torch.bfloat16, **shape)
    return transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        dtype=torch.bfloat16,
    )


def random_rows(config: Any, batch: int, tokens: int) -> List[torch.Tensor]:
    shape = (batch, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
    return [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]


def dynamic(config: Any, batch: int, context: int) -> Any:
    cache = transformers.DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(*random_rows(config, batch, context), layer)
    return cache


def ours(format: str) -> Callable[[Any, int, int], Any]:
    def make(config: Any, batch: int, context: int) -> Any:
        cache = attn.transformers.QuantizedCache(config, format, max_tokens=context + 64)
        piece = max(64, 1 << 24 >> (batch - 1).bit_length() >> 10)
        for layer in cache.layers:
            layer.lazy_initialization(*random_rows(config, batch, 0))
            for start in range(0, context, piece):
                k, v = (x.transpose(1, 2) for x in random_rows(config, batch, min(piece, context - start)))
                layer.cache.append(k, v, sequences=layer.slots)
            layer.seen = context
        return cache

    return make


def quanto(config: Any, batch: int, context: int) -> Any:
    cache = transformers.QuantizedCache("quanto", config, nbits=4)
    for layer in range(config.num_hidden_layers):
        cache.update(*random_rows(config, batch, context), layer)
    return cache


def bytes_per_token(config: Any, format: Optional[str]) -> float:
    """Of one sequence, all layers."""
    dim = config.hidden_size // config.num_attention_heads
    if format is None:
        return config.num_hidden_layers * config.num_key_value_heads * dim * 4
    cache = attn.Cache(format, heads=config.num_key_value_heads, dim=dim, max_tokens=0, pages=0, device="cpu")
    return config.num_hidden_layers * cache.stats().page_bytes / 64


def bytes_of(cache: Any) -> int:
    own = getattr(cache, "nbytes", None)
    if own is not None:
        return own
    total = 0
    for layer in cache.layers:
        total += layer.keys.nbytes + layer.values.nbytes
        for part in ("_quantized_keys", "_quantized_values"):
            packed = getattr(layer, part, None)
            if packed is not None:
                total += packed._data._data.nbytes + packed._scale.nbytes + packed._shift.nbytes
    return total


def unpacks_by_torch() -> Optional[str]:
    """Builds quanto's kernel; where that fails, lets torch unpack in its place, and returns why."""
    try:
        torch.ops.quanto.unpack(torch.zeros(16, 16, dtype=torch.uint8, device=DEVICE), 4)
        return None
    except Exception as error:
        use_torch_to_unpack()
        return str(error).splitlines()[0][:200]


def use_torch_to_unpack() -> None:
    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.cat(parts)

    kernels = torch.library.Library("quanto", "IMPL")
    kernels.impl("unpack", unpack, DEVICE.upper(), allow_override=True)
    # The kernel is there as long as its library.
    use_torch_to_unpack.library = kernels


def step_ms(model: Any, cache: Any, batch: int, context: int, steps: int, seconds: float) -> float:
    """The median of up to `steps` steps, in about `seconds`."""
    ids = torch.randint(0, 1000, (batch, 1), device=DEVICE)
    times, warm, begun = [], 0, time.perf_counter()
    with torch.no_grad():
        for i in range(steps + WARM):
            position = torch.full((batch, 1), context + i, device=DEVICE)
            synchronize()
            start = time.perf_counter()
            model(ids, **{PAST: cache}, position_ids=position, logits_to_keep=1)
            synchronize()
            now = time.perf_counter()
            is_warm = warm >= WARM or (warm >= 2 and now - begun > seconds / 3)
            if is_warm:
                times.append(1e3 * (now - start))
            warm += not is_warm
            if len(times) == steps or (len(times) >= 3 and now - begun > seconds):
                break
    return sorted(times)[len(times) // 2]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measured(model: Any, config: Any, make: Callable, batch: int, context: int, options: Any) -> Dict[str, Any]:
    try:
        cache = make(config, batch, context)
        return dict(ms=step_ms(model, cache, batch, context, options.steps, options.seconds), gb=bytes_of(cache) / 1e9)
    except (torch.cuda.OutOfMemoryError, attn.AttnError) as error:
        return dict(ms=None, gb=None, why=str(error).splitlines()[0][:200])
    finally:
        # A pool goes back to the driver once its stream is idle.
        cache = None
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser.add_argument("--batch", default="1,32", type=numbers)
    parser.add_argument("--context", default="2048,16384,65536", type=numbers)
    parser.add_argument("--layers", type=int, help="32, or 2 of the tiny shape")
    parser.add_argument("--steps", default=30, type=int)
    parser.add_argument("--seconds", default=20.0, type=float, help="about as much for a cell of the table")
    parser.add_argument("--limit", type=float, help="seconds, from the program's start, after which no cell of the table is begun")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the program")
    parser.add_argument("--quanto-kernel", default="auto", choices=["auto", "never"])
    parser.add_argument("--json", help="a file for the rows")
    options = parser.parse_args()
    global DEVICE
    DEVICE = options.device
    config = config_of(options.layers or (2 if options.tiny else 32), options.tiny)
    torch.set_default_device(DEVICE)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", dtype=torch.bfloat16).eval()
    torch.set_default_device("cpu")
    caches = {"DynamicCache, bf16": ("sdpa", dynamic, None)}
    caches.update({f"attn {format}": ("attn", ours(format), format) for format in OURS})
    try:
        import optimum.quanto  # noqa: F401
    except ImportError as error:
        print(f"transformers' QuantizedCache is not timed: {error}")
    else:
        reason = unpacks_by_torch() if options.quanto_kernel == "auto" else use_torch_to_unpack() or "as asked"
        if reason:
            print(f"quanto's 4 bits are unpacked by torch's operations: {reason}")
        caches[f"QuantizedCache, quanto int4{', unpacked by torch' if reason else ''}"] = ("sdpa", quanto, None)
    name, free = DEVICE, None
    if DEVICE == "cuda":
        name, free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0] - 6e9
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {config.num_hidden_layers} layers")
    print("| batch | context | cache | ms | cache, GB | longest |\n|---|---|---|---|---|---|", flush=True)
    rows = []
    for batch in options.batch:
        for context in options.context:
            for name, (attention, make, format) in caches.items():
                model.set_attn_implementation(attention)
                if options.limit is not None and time.perf_counter() - BEGUN > options.limit:
                    print(f"| {batch} | {context} | {name} | not measured: --limit {options.limit:.0f} | | |", flush=True)
                    continue
                row = measured(model, config, make, batch, context, options)
                longest = None if free is None or "quanto" in name else int(free / batch / bytes_per_token(config, format))
                rows.append(dict(row, batch=batch, context=context, cache=name, longest=longest))
                ms, gb = ("does not fit", "–") if row["ms"] is None else (f"{row['ms']:.1f}", f"{row['gb']:.2f}")
                print(f"| {batch} | {context} | {name} | {ms} | {gb} | {longest or '–'} |", flush=True)
                if options.json:
                    # After each row, so that a step that is ended leaves those before.
                    with open(options.json, "w") as file:
                        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
