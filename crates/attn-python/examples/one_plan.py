"""What a plan for the longest length costs at shorter ones: engines capture a CUDA graph once, at the longest length that a model has.

    python one_plan.py [--longest 131072] [--format int8]

Decodes caches of several lengths by a plan for the longest and by a plan for just that length, each in a CUDA graph over caches that rotate beyond
L2, and prints microseconds of both beside a plain read of the same bytes (a copy of half of them, which reads and writes as many).
"""

from __future__ import annotations

import argparse
from typing import Callable, List, Tuple

import attn.torch
import torch

DIM, PAGE = 128, 64
SHAPES = [(32, 8, 1), (32, 8, 16), (8, 1, 32), (32, 8, 64)]


def median_us(launch: Callable[[int], None], copies: int) -> float:
    """The time of one launch: the median over replays of a graph that goes through all copies."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(copies):
            launch(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            launch(i)
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / copies)
    return sorted(times)[len(times) // 2]


class Caches:
    """As many copies of a batch's cache as L2 cannot hold."""

    def __init__(self, format: str, heads: int, kv_heads: int, batch: int, length: int, longest: int) -> None:
        self.shape = dict(heads=heads, kv_heads=kv_heads, dim=DIM, q_lens=[1] * batch)
        self.format, self.length, self.longest = format, length, longest
        one = self.plan(length)
        pages = -(-length // PAGE)
        slots = one.residual_slots(1)
        own = pages + slots
        self.bytes = batch * pages * one.page_bytes
        self.copies = max(4, -(-200_000_000 // self.bytes))
        self.pools = [one.new_pool(batch * own) for _ in range(self.copies)]
        for pool in self.pools:
            # Bytes whose f16 scales are small and finite.
            pool.copy_(torch.randint(0, 64, pool.shape, dtype=torch.uint8, device="cuda"))
        first = torch.arange(batch, dtype=torch.int32, device="cuda")[:, None] * own
        self.table = torch.zeros(batch, -(-longest // PAGE), dtype=torch.int32, device="cuda")
        self.table[:, :pages] = first + torch.arange(pages, dtype=torch.int32, device="cuda")
        self.residuals = first + pages + torch.arange(slots, dtype=torch.int32, device="cuda") if slots else None
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, heads, DIM, device="cuda", dtype=torch.bfloat16)
        one.close()

    def plan(self, longest: int) -> attn.torch.Plan:
        return attn.torch.Plan(self.format, max_kv_len=longest, **self.shape)

    def us(self, longest: int) -> float:
        plan = self.plan(longest)
        out = torch.empty_like(self.q)
        time = median_us(lambda i: plan.attend_into(self.q, out, self.pools[i], self.table, self.lens, self.residuals), self.copies)
        plan.close()
        return time

    def read_us(self) -> float:
        half = self.bytes // 2
        targets = [torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(self.copies)]
        return median_us(lambda i: targets[i].copy_(self.pools[i].view(-1)[:half]), self.copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--format", default="int8")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {options.format}, plans for {options.longest} tokens and for the length itself")
    print("| heads | batch | length | plan for the longest, µs | own plan, µs | more | copy of the bytes, µs |\n|---|---|---|---|---|---|---|")
    rows: List[Tuple] = []
    for heads, kv_heads, batch in SHAPES:
        for length in (1024, 4096, 32768):
            if batch * length > 1 << 21:
                continue
            caches = Caches(options.format, heads, kv_heads, batch, length, options.longest)
            long, own, read = caches.us(options.longest), caches.us(length), caches.read_us()
            rows.append((long / own,))
            print(f"| {heads}/{kv_heads} | {batch} | {length} | {long:.1f} | {own:.1f} | {100 * (long / own - 1):+.0f} % | {read:.1f} |", flush=True)
            del caches
            torch.cuda.empty_cache()
    print(f"most: {100 * (max(rows)[0] - 1):+.0f} %")


if __name__ == "__main__":
    main()
