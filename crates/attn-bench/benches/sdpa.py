#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on the shapes of `attn bench --backend cuda` that have a 16-bit form.

    python3 crates/attn-bench/benches/sdpa.py [--json] [NAME...]      # NAME: any part of family/name/format

Each backend is chosen explicitly and named in its row; one that refuses a shape prints its reason. K and V are contiguous BNSH
and rotate beyond L2, launches are captured in CUDA graphs, and figures are those of 15 replays, as in `attn bench`. With
several query heads per KV head, each backend runs twice: as `enable_gqa`, and `folded`, with those heads as query tokens, which
gives the same result where nothing is masked. Causality among the last 3 tokens (rows48) has no expression in this API: it is
timed without a mask, and the row says so. Prompts are timed with the causal mask and without, not folded. The read is the faster of torch.sum and a Triton kernel, of the same bytes.
"""

import argparse
import json
import statistics
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROTATED = 400 << 20
MOST_COPIES = 200
WARM_UPS, RUNS = 3, 15
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def shapes():
    """(name, dtype, query heads, KV heads, q_len, batch, ctx), named as attn_bench::workload names them; D = 128."""
    bf16, f16 = torch.bfloat16, torch.float16
    for ctx in (1024, 8192, 32768, 131072):
        yield f"single/32-8-ctx{ctx}/bf16", bf16, 32, 8, 1, 1, ctx
    for batch in (8, 64):
        yield f"batch/32-8-ctx4096-batch{batch}/bf16", bf16, 32, 8, 1, batch, 4096
    for batch in (512, 256, 128, 64, 32):
        yield f"gqa8/batch{batch}/bf16", bf16, 8, 1, 1, batch, 8192
    for family, q_len in (("rows48", 3), ("rows16", 1)):
        for log in range(10, 18):
            batch = 256 >> (log - 10)
            yield f"{family}/ctx{1 << log}-batch{batch}/bf16", bf16, 16, 1, q_len, batch, 1 << log
    for ctx in (128, 256, 512, 1024, 2048, 4096, 8192):
        yield f"mha/ctx{ctx}/f16", f16, 32, 32, 1, 1, ctx
    for batch in (2, 4, 8, 16, 32, 64, 128):
        yield f"mha/ctx128-batch{batch}/f16", f16, 32, 32, 1, batch, 128
    for log in range(10, 16):
        ctx, batch = 1 << log, 32768 >> log
        for mask in ("", "-not-causal"):
            yield f"prefill/16-1-ctx{ctx}-batch{batch}{mask}/bf16", bf16, 16, 1, ctx, batch, ctx


if triton:

    @triton.jit
    def read_kernel(x, sums, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(sums + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < count, other=0)))


def replay(launch, copies):
    """Microseconds per launch of each replay of a graph of `launch(i)`, i below max(copies, 4)."""
    launches = max(copies, 4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % copies)
    for _ in range(WARM_UPS):
        graph.replay()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return times


def read_times(pool, bytes_, copies):
    """The fastest way to read, and its name."""
    words = pool.view(torch.int32)
    count = bytes_ // 4
    parts = [words[i * count : (i + 1) * count] for i in range(copies)]
    ways = {"torch.sum": lambda i: torch.sum(parts[i], dtype=torch.int32)}
    if triton:
        block = 8192
        grid = (triton.cdiv(count, block),)
        sums = torch.empty(grid[0], dtype=torch.int32, device="cuda")
        ways["triton"] = lambda i: read_kernel[grid](parts[i], sums, count, BLOCK=block, num_warps=8)
    timed = {}
    for name, way in ways.items():
        try:
            timed[name] = replay(way, copies)
        except Exception as error:
            print(f"sdpa.py: no read by {name}: {error}", file=sys.stderr)
    return min(timed.items(), key=lambda item: statistics.median(item[1]))


def reason(error, caught):
    """Why SDPA refused: its warnings say more than its error."""
    words = [str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__]
    for warning in caught:
        text = str(warning.message).split("(Triggered internally")[0].strip()
        if text and text not in words:
            words.append(text)
    return "; ".join(words)[:400].replace("|", "/")


def measure(pool, shape):
    """Rows of one shape: every backend, every way."""
    name, dtype, q_heads, kv_heads, q_len, batch, ctx = shape
    dim = 128
    elems = batch * kv_heads * ctx * dim
    bytes_ = elems * 2 * 2
    copies = max(1, min(MOST_COPIES, -(-ROTATED // bytes_)))
    numbers = pool[: copies * 2 * elems].view(dtype).view(copies, 2, batch, kv_heads, ctx, dim)
    per_kv = q_heads // kv_heads
    q = torch.randn(batch, q_heads, q_len, dim, device="cuda", dtype=dtype)
    is_prompt = q_len == ctx
    is_causal = is_prompt and "not-causal" not in name
    ways = {"": (q, per_kv > 1)}
    if per_kv > 1 and not is_prompt:
        # Heads of one KV head side by side, as rows of it.
        ways[" folded"] = (q.reshape(batch, kv_heads, per_kv * q_len, dim), False)
    how_read, read = read_times(pool, bytes_, copies)
    for backend, kind in BACKENDS.items():
        for way, (query, gqa) in ways.items():
            row = {"shape": name, "peer": backend + way, "bytes": bytes_, "masked": False if q_len > 1 and not is_prompt else None}
            extra = ({"enable_gqa": True} if gqa else {}) | ({"is_causal": True} if is_causal else {})

            def launch(i):
                F.scaled_dot_product_attention(query, numbers[i, 0], numbers[i, 1], **extra)

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    with sdpa_kernel([kind]):
                        times = replay(launch, copies)
                except Exception as error:  # Whatever it is, it is this row's answer.
                    torch.cuda.synchronize()
                    yield row | {"reason": reason(error, caught)}
                    continue
            us, read_us = statistics.median(times), statistics.median(read)
            yield row | {
                "us": us,
                "us_min": min(times),
                "us_median": us,
                "gb_per_s": bytes_ / us / 1e3,
                "read_us": read_us,
                "read_us_min": min(read),
                "read_us_median": read_us,
                "share": read_us / us,
                "read_by": how_read,
            }


def line(row):
    head = f"| {row['shape']} | {row['peer']}{', no mask' if row['masked'] is False else ''} | {row['bytes'] / 1e6:.1f} |"
    if "reason" in row:
        return f"{head} {row['reason']} |"
    return (
        f"{head} {row['us_min']:.1f} | {row['us_median']:.1f} | {row['gb_per_s']:.1f} | {row['read_us_min']:.1f} "
        f"| {row['read_us_median']:.1f} | {row['share'] * 100:.0f} % |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="any part of family/name/format")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sdpa.py: PyTorch sees no CUDA device; run it on a machine with one")
    chosen = [s for s in shapes() if not args.names or any(name in s[0] for name in args.names)]
    if not chosen:
        sys.exit("sdpa.py: no shape is called " + " or ".join(args.names))
    device = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}"
    largest = max(s[5] * s[3] * s[6] * 128 * 2 for s in chosen)
    pool = torch.empty(largest + ROTATED // 2, dtype=torch.bfloat16, device="cuda").normal_()
    rows = []
    if not args.json:
        print(f"{device}; {RUNS} repetitions, caches cold, rates of the medians\n")
        print("| shape | peer | MB | µs min | median | GB/s | read min | median | of the read |\n|---|---|---|---|---|---|---|---|---|")
    for shape in chosen:
        for row in measure(pool, shape):
            rows.append({"device": device} | row)
            if not args.json:
                print(line(row), flush=True)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
