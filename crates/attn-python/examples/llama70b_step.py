"""One decode step of a Llama-2-70B-shaped model on any number of GPUs: milliseconds and memory, by cache format, batch and context.

    python llama70b_step.py                                   # one GPU
    torchrun --nproc-per-node 4 llama70b_step.py              # four, heads sharded (tensor parallel)
    python llama70b_step.py --layers 8 --batch 1,16 --context 2048 --formats bf16,int8

80 layers, 64 query and 8 KV heads of 128 dims, hidden size 8192, feed-forward 28672. Weights are random numbers in fp8 (e4m3, one scale for a
tensor), products cuBLAS's through torch, attention and the cache this library's, the whole step one CUDA graph. A rank has 64/n query heads, 8/n KV
heads and 28672/n feed-forward columns; two all-reduces a layer (NCCL) add up their shares. Random tokens fill the cache: one sequence's pages are
quantized, and the others copy them.

The last lines say, for each format, batch and context, what a step takes, what the cache takes on each GPU, and which do not fit.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from typing import List, Optional

import attn.torch
import torch
import torch.distributed as dist

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, FEED = 8192, 80, 64, 8, 128, 28672
PAGE = 64


@dataclass
class Rank:
    """This process among all, and its GPU."""

    index: int
    count: int
    device: torch.device

    @staticmethod
    def of_environment() -> "Rank":
        index, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        if KV_HEADS % count:
            raise SystemExit(f"{count} GPUs: 8 KV heads are sharded among 1, 2, 4 or 8")
        if count > 1:
            dist.init_process_group("nccl", device_id=device)
        return Rank(index, count, device)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        if self.count > 1:
            dist.all_reduce(x)
        return x

    def say(self, text: str) -> None:
        if self.index == 0:
            print(text, flush=True)


class Linear:
    """A product with random fp8 weights `[outputs, inputs]`; inputs are rounded to fp8 with a fixed scale."""

    def __init__(self, outputs: int, inputs: int, device: torch.device) -> None:
        weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=device)
        # In parts: the numbers in bf16 would take twice the weights' room.
        for part in weight.split(4096):
            part.copy_(torch.randn(part.shape, device=device, dtype=torch.bfloat16))
        self.weight = weight.t()
        self.scale_in = torch.tensor(1 / 16, device=device)
        self.scale = torch.tensor(inputs**-0.5, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (x * 16).clamp(-448, 448).to(torch.float8_e4m3fn)
        rows = rounded.shape[0]
        if rows % 16:
            # fp8 products of cuBLAS take multiples of 16 rows.
            rounded = torch.nn.functional.pad(rounded.view(torch.uint8), (0, 0, 0, -rows % 16)).view(torch.float8_e4m3fn)
        out = torch._scaled_mm(rounded, self.weight, self.scale_in, self.scale, out_dtype=torch.bfloat16)
        return out[:rows]


class Layer:
    def __init__(self, rank: Rank) -> None:
        n, device = rank.count, rank.device
        self.qkv = Linear((HEADS + 2 * KV_HEADS) // n * DIM, HIDDEN, device)
        self.o = Linear(HIDDEN, HEADS // n * DIM, device)
        self.up = Linear(2 * FEED // n, HIDDEN, device)
        self.down = Linear(HIDDEN, FEED // n, device)


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Step:
    """The cache of a batch, and a graph of one step over it."""

    def __init__(self, rank: Rank, layers: List[Layer], format: str, batch: int, context: int) -> None:
        self.rank, self.layers = rank, layers
        device, n = rank.device, rank.count
        self.heads, self.kv_heads = HEADS // n, KV_HEADS // n
        shape = dict(heads=self.heads, kv_heads=self.kv_heads, dim=DIM, device=device)
        self.plan = attn.torch.Plan(format, q_lens=[1] * batch, max_kv_len=context, **shape)
        pages = -(-context // PAGE)
        slots = self.plan.residual_slots(1)
        self.own = pages + slots
        # A sequence has its pages, then its residual pages.
        first = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * self.own
        self.table = first + torch.arange(pages, dtype=torch.int32, device=device)
        self.residuals: Optional[torch.Tensor] = first + pages + torch.arange(slots, dtype=torch.int32, device=device) if slots else None
        self.kv_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.pools = [self.plan.new_pool(batch * self.own) for _ in layers]
        self._fill(format, context, shape)
        self.x = torch.randn(batch, HIDDEN, device=device, dtype=torch.bfloat16)
        angle = context * 10000.0 ** (-torch.arange(0, DIM, 2, device=device) / DIM)
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.graph = self._captured()

    def _fill(self, format: str, context: int, shape: dict) -> None:
        """Random tokens in every sequence: one is quantized, the others copy its pages."""
        one = attn.torch.Plan(format, q_lens=[1], max_kv_len=context, **shape)
        device = self.rank.device
        token = torch.arange(context, device=device)
        slots = self.table[0, token // PAGE].long() * PAGE + token % PAGE
        residuals = None
        if self.residuals is not None:
            count = self.residuals.shape[1]
            page = token // PAGE
            kept = page > page[-1] - count
            residuals = torch.where(kept, self.residuals[0, page % count], -1).int()
        generator = torch.Generator(device).manual_seed(7)
        k, v = (torch.randn(context, self.kv_heads, DIM, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
        for pool in self.pools:
            one.append_slots(k, v, pool, slots, residuals)
            pool.view(-1, self.own, pool.shape[1])[1:] = pool[: self.own]
        one.close()

    def run(self) -> torch.Tensor:
        """A step: hidden states in, hidden states out."""
        x, q_width, kv_width = self.x, self.heads * DIM, self.kv_heads * DIM
        for layer, pool in zip(self.layers, self.pools):
            qkv = layer.qkv(normed(x)).view(len(x), -1, DIM)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            q, k = rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin)
            out = self.plan.step(q, k, v, pool, self.table, self.kv_lens, self.residuals)
            x = x + self.rank.add_up(layer.o(out.reshape(len(x), q_width)))
            gate, up = layer.up(normed(x)).chunk(2, -1)
            x = x + self.rank.add_up(layer.down(torch.nn.functional.silu(gate) * up))
        return x

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.out = self.run()
        return graph

    def milliseconds(self, steps: int) -> float:
        """The median of `steps` replays."""
        for _ in range(3):
            self.graph.replay()
        times = []
        for _ in range(steps):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def close(self) -> None:
        self.plan.close()


def cache_bytes(rank: Rank, format: str, batch: int, context: int, layers: int) -> int:
    """Bytes of the cache on a GPU, before it is allocated."""
    kv_heads = KV_HEADS // rank.count
    plan = attn.torch.Plan(format, heads=HEADS // rank.count, kv_heads=kv_heads, dim=DIM, q_lens=[1], max_kv_len=64)
    bytes = layers * batch * (-(-context // PAGE) + plan.residual_slots(1)) * plan.page_bytes
    plan.close()
    return bytes


def measured(rank: Rank, layers: List[Layer], format: str, batch: int, context: int, steps: int) -> dict:
    needed = cache_bytes(rank, format, batch, context, len(layers))
    row = dict(format=format, batch=batch, context=context, gpus=rank.count, cache_gb=needed / 1e9, ms=None)
    free = torch.tensor(torch.cuda.mem_get_info()[0], device=rank.device)
    if rank.count > 1:
        dist.all_reduce(free, dist.ReduceOp.MIN)
    # What a step computes with takes up to 2 GB at these batches.
    if needed + 2e9 < free.item():
        step = Step(rank, layers, format, batch, context)
        row["ms"] = step.milliseconds(steps)
        row["digest"] = step.out.double().abs().mean().item()
        step.close()
        del step
        torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser.add_argument("--formats", default="bf16,int8,int4", type=lambda text: text.split(","))
    parser.add_argument("--batch", default="1,16,64,256", type=numbers)
    parser.add_argument("--context", default="2048,4096,8192,16384", type=numbers)
    parser.add_argument("--layers", default=LAYERS, type=int)
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--json", help="a file for the rows")
    options = parser.parse_args()
    rank = Rank.of_environment()
    torch.manual_seed(rank.index)
    layers = [Layer(rank) for _ in range(options.layers)]
    weights = torch.cuda.memory_allocated() / 1e9
    rank.say(f"{rank.count} x {torch.cuda.get_device_name()}, {options.layers} layers, weights {weights:.1f} GB on each GPU")
    rows = []
    for context in options.context:
        for batch in options.batch:
            for format in options.formats:
                row = measured(rank, layers, format, batch, context, options.steps)
                rows.append(row)
                took = "does not fit" if row["ms"] is None else f"{row['ms']:8.2f} ms"
                rank.say(f"{format:6} batch {batch:4} context {context:6}: {took:>12}, cache {row['cache_gb']:7.2f} GB on each GPU")
    if options.json and rank.index == 0:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    if rank.count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
