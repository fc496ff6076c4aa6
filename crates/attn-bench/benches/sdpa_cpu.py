#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on a CPU, for one shape given as `attn bench --backend cpu` takes it.

    python3 crates/attn-bench/benches/sdpa_cpu.py --heads 32/8 --ctx 1024 --q-len 1024 --threads 1,2

Causal: the query tokens are the last of the context. K and V are contiguous, [batch, heads, ctx, dim], and warm. Heads of one KV head share it
(`enable_gqa`), or each has a copy of its own (`copied`), made before the clock starts. Without torch: pip install torch numpy.
"""

import argparse
import time

import torch
import torch.nn.functional as F


def heads(text):
    q, kv = text.split("/")
    return int(q), int(kv)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=heads, default=(32, 8), help="query heads and KV heads, as in 32/8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--q-len", type=int, default=1024)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    (q_heads, kv_heads), dim, ctx, q_len = args.heads, args.dim, args.ctx, args.q_len
    seen = sum(ctx - q_len + i + 1 for i in range(q_len))
    flops = 4 * seen * q_heads * dim
    # torch's own flag puts the diagonal at the first token: right where the prompt is the whole context.
    mask = {"is_causal": True}
    if q_len < ctx:
        mask = {"attn_mask": torch.ones(q_len, ctx, dtype=torch.bool).tril(ctx - q_len)}
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; {args.runs} repetitions, rates of the fastest\n")
    print("| shape | threads | dtype | K and V | ms min | median | TFLOP/s |\n|---|---|---|---|---|---|---|")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(1, q_heads, q_len, dim).to(dtype)
            k, v = (torch.randn(1, kv_heads, ctx, dim).to(dtype) for _ in range(2))
            copied = [x.repeat_interleave(q_heads // kv_heads, 1) for x in (k, v)]
            for way, (keys, values), extra in (("shared", (k, v), {"enable_gqa": True}), ("copied", copied, {})):
                times = []
                for _ in range(args.runs + 1):
                    start = time.perf_counter()
                    F.scaled_dot_product_attention(q, keys, values, **mask, **extra)
                    times.append(time.perf_counter() - start)
                times = sorted(times[1:])
                print(
                    f"| {q_heads}/{kv_heads} × {dim}, {q_len} of {ctx} | {threads} | {str(dtype)[6:]} | {way} | {times[0] * 1e3:.1f} "
                    f"| {times[len(times) // 2] * 1e3:.1f} | {flops / times[0] / 1e12:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
