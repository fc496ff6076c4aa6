"""How long attention on the CPU takes by itself and behind a product of torch, whose idle OpenMP threads spin on its cores for some milliseconds.

    python beside_torch.py
    GOMP_SPINCOUNT=1000 python beside_torch.py

A decode step over int8 pages, 32 query and 8 KV heads of 128 dims, 8192 tokens; ten pools in turn, so that K and V come from memory. Median and least of 60, in microseconds,
beside a plain read of as many bytes.
"""

import statistics
import time

import torch

import attn

TOKENS, HEADS, KV_HEADS, DIM, POOLS, STEPS = 8192, 32, 8, 128, 10, 60


def microseconds(call):
    took = []
    for i in range(STEPS):
        begun = time.perf_counter()
        call(i)
        took.append((time.perf_counter() - begun) * 1e6)
    return f"{statistics.median(took):.0f} (least {min(took):.0f})"


def main():
    pages = attn.HostPages("int8", kv_heads=KV_HEADS, dim=DIM, page_size=64)
    table = torch.arange(TOKENS // 64, dtype=torch.int32)[None]
    pools = [torch.zeros(TOKENS // 64, pages.page_bytes, dtype=torch.uint8) for _ in range(POOLS)]
    keys = torch.randn(TOKENS, KV_HEADS, DIM).bfloat16()
    for pool in pools:
        pages.append_slots(keys, keys, pool, torch.arange(TOKENS))
    q = torch.randn(1, HEADS, DIM).bfloat16()
    out = torch.empty_like(q)
    x, weight = torch.randn(1, 4096).bfloat16(), torch.randn(512, 4096).bfloat16()
    words = [pool.view(-1).view(torch.int64) for pool in pools]

    def attend(i):
        pages.attend(q, pools[i % POOLS], table, [TOKENS], out=out)

    def product(i):
        return x @ weight.T

    def both(i):
        product(i)
        attend(i)

    for name, call in (("a read of the bytes", lambda i: words[i % POOLS].sum()), ("a product of torch", product), ("attention", attend), ("a product and attention", both)):
        # What the last kind has left running ends.
        time.sleep(0.1)
        print(f"{name}: {microseconds(call)} µs", flush=True)


if __name__ == "__main__":
    main()
