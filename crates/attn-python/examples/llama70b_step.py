"""One decode step of a Llama-2-70B-shaped model on any number of GPUs: milliseconds and memory, by cache format, batch and context.

    python llama70b_step.py                                   # one GPU
    torchrun --nproc-per-node 4 llama70b_step.py              # four, heads sharded (tensor parallel)
    torchrun --nproc-per-node 4 llama70b_step.py --context-parallel --batch 1 --context 131072    # four, the cache's tokens sharded
    python llama70b_step.py --predict                         # no GPU: what 1, 2, 4 and 8 should take (llama70b.py says from what)
    python llama70b_step.py --layers 8 --batch 1,16 --context 2048 --formats bf16,int8
    torchrun --nproc-per-node 2 llama70b_step.py --device cpu --tiny --batch 2 --context 3000     # to try the program

80 layers, 64 query and 8 KV heads of 128 dims, hidden size 8192, feed-forward 28672. Weights are random numbers in fp8 (e4m3, one scale for a
tensor), products cuBLAS's through torch, attention and the cache this library's, the whole step one CUDA graph. A rank has 64/n query heads, 8/n KV
heads and 28672/n feed-forward columns; two all-reduces a layer (NCCL) add up their shares. Random tokens fill the cache: one sequence's pages are
quantized, and the others copy them.

With --context-parallel a rank has a part of each sequence's tokens in whole spans, for all KV heads: q, k and v of a step are gathered, each rank
attends its own tokens, and each merges its heads of the states of all ranks' spans: the bits of one GPU.

Weights and cache are the same numbers on any number of GPUs. The last lines say, for each format, batch and context, what a step takes, what the cache
takes on each GPU, which do not fit, and the most probable tokens of the first rows under a random head. Attention has the same bits on any number of
GPUs, but a sum over ranks rounds otherwise than one product, and rounding to fp8 makes more of it: with --sums bfloat16, as servers sum, or float32, many
tokens are the same. With --sums ordered each eighth of a product is computed by itself, and eighths are added up in pairs: all bits are the same, for more
and smaller products.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from dataclasses import dataclass
from typing import List, Optional, Tuple

import attn.distributed
import attn.torch
import torch
import torch.distributed as dist
from llama70b import STEP_BYTES, Shape, cache_bytes, predictions

PAGE = 64
# Weights are made in eighths, each of a seed of its own, so that they do not depend on the number of ranks.
PARTS = 8


TINY = Shape(hidden=256, layers=2, heads=16, kv_heads=8, dim=64, feed=512, vocabulary=500)


@dataclass
class Rank:
    """This process among all, and its device."""

    index: int
    count: int
    device: torch.device

    @staticmethod
    def of_environment(device: str) -> "Rank":
        index, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if PARTS % count:
            raise SystemExit(f"{count} ranks: weights and KV heads are sharded among 1, 2, 4 or 8")
        if device == "cpu":
            if count > 1:
                dist.init_process_group("gloo")
            return Rank(index, count, torch.device("cpu"))
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(own)
        if count > 1:
            dist.init_process_group("nccl", device_id=own)
        return Rank(index, count, own)

    @property
    def parts(self) -> range:
        """The eighths of the weights that are this rank's."""
        each = PARTS // self.count
        return range(self.index * each, (self.index + 1) * each)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in an order of NCCL's or gloo's."""
        if self.count > 1:
            dist.all_reduce(x)
        return x

    def gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """What all ranks have, side by side in their order."""
        if self.count == 1:
            return x
        everyone = x.new_empty(self.count, *x.shape)
        dist.all_gather_into_tensor(everyone.view(-1), x.reshape(-1))
        return torch.cat(list(everyone), dim)

    def least(self, x: float) -> float:
        """The smallest of all ranks' numbers."""
        smallest = torch.tensor(float(x), device=self.device)
        if self.count > 1:
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return smallest.item()

    def say(self, text: str) -> None:
        if self.index == 0:
            print(text, flush=True)


def added_in_pairs(x: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, a power of two; the sums of its halves add up to the same bits."""
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def random(seed: Tuple[int, ...], *shape: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device)
    generator.manual_seed(sum(n * 1000**i for i, n in enumerate(seed)))
    return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)


class Linear:
    """A product with some eighths of random fp8 weights; inputs are rounded to fp8 with a fixed scale.

    `outputs` and `inputs` are those of all eighths. `parts` are eighths of the inputs, or of each of the `groups` that the outputs are made of.
    """

    def __init__(self, device: torch.device, parts: range, seed: int, outputs: int, inputs: int, groups: Optional[List[int]] = None) -> None:
        self.groups = None if groups is None else [n * len(parts) // PARTS for n in groups]
        if self.groups is None:
            weight = torch.empty(outputs, inputs * len(parts) // PARTS, dtype=torch.float8_e4m3fn, device=device)
            for part, room in zip(parts, weight.chunk(len(parts), 1)):
                room.copy_(random((seed, part), *room.shape, device=device))
        else:
            weight = torch.empty(sum(self.groups), inputs, dtype=torch.float8_e4m3fn, device=device)
            rooms = [group.chunk(len(parts)) for group in weight.split(self.groups)]
            for i, part in enumerate(parts):
                made = random((seed, part), outputs // PARTS, inputs, device=device)
                for room, rows in zip(rooms, made.split([n // PARTS for n in groups])):
                    room[i].copy_(rows)
        self.weight = weight.t()
        self.scale_in = torch.tensor(1 / 16, device=device)
        self.scale = torch.tensor(inputs**-0.5, device=device)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        rounded = (x * 16).clamp(-448, 448).to(torch.float8_e4m3fn)
        if not x.is_cuda:
            return ((rounded.float() @ self.weight.float()) * (self.scale_in * self.scale)).to(dtype)
        rows = rounded.shape[0]
        if rows % 16:
            # fp8 products of cuBLAS take multiples of 16 rows.
            rounded = torch.nn.functional.pad(rounded.view(torch.uint8), (0, 0, 0, -rows % 16)).view(torch.float8_e4m3fn)
        out = torch._scaled_mm(rounded, self.weight, self.scale_in, self.scale, out_dtype=dtype)
        return out[:rows]


class Product:
    """A rank's eighths of a product: as one, or each by itself."""

    def __init__(self, rank: Rank, is_ordered: bool, *arguments: object) -> None:
        parts = [range(part, part + 1) for part in rank.parts] if is_ordered else [rank.parts]
        self.rank, self.is_ordered = rank, is_ordered
        self.parts = [Linear(rank.device, part, *arguments) for part in parts]

    def groups(self, x: torch.Tensor) -> List[torch.Tensor]:
        """The rank's part of each group of the outputs."""
        found = [part(x).split(part.groups, 1) for part in self.parts]
        return [torch.cat(group, 1) if len(group) > 1 else group[0] for group in zip(*found)]

    def total(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """All outputs, of all ranks' inputs."""
        shares = [part(of_part, dtype) for part, of_part in zip(self.parts, x.chunk(len(self.parts), 1))]
        if not self.is_ordered:
            return self.rank.add_up(shares[0])
        return added_in_pairs(self.rank.gathered(added_in_pairs(torch.stack(shares))[None], 0))


class Layer:
    def __init__(self, rank: Rank, shape: Shape, index: int, is_ordered: bool) -> None:
        seed, hidden, feed = 4 * index, shape.hidden, shape.feed
        q, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
        self.qkv = Product(rank, is_ordered, seed, q + 2 * kv, hidden, [q, kv, kv])
        self.o = Product(rank, is_ordered, seed + 1, hidden, q)
        self.up = Product(rank, is_ordered, seed + 2, 2 * feed, hidden, [feed, feed])
        self.down = Product(rank, is_ordered, seed + 3, hidden, feed)


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass
class Share:
    """What a rank keeps of the cache: KV heads, and positions."""

    kv_heads: slice
    tokens: range
    is_by_tokens: bool
    # Positions of ranks ahead, tokens behind, and the most that a rank has.
    before: int
    after: int
    longest: int

    @staticmethod
    def of(rank: Rank, shape: Shape, context: int, is_by_tokens: bool) -> "Share":
        if rank.count == 1 or not is_by_tokens:
            each = shape.kv_heads // rank.count
            return Share(slice(rank.index * each, (rank.index + 1) * each), range(context), False, 0, 0, context)
        each = attn.distributed.tokens_of_rank(context, rank.count)
        first, last = (min(context, i * each) for i in (rank.index, rank.index + 1))
        return Share(slice(0, shape.kv_heads), range(first, last), True, rank.index * each, context - last, each)

    @property
    def spans(self) -> int:
        """States of each row that a rank leaves, as many on all."""
        return -(-self.longest // attn.distributed.SPAN)

    def has_newest(self, context: int) -> bool:
        return len(self.tokens) > 0 and self.tokens[-1] == context - 1

    def rows(self, shape: Shape, context: int, device: torch.device) -> List[torch.Tensor]:
        """K and V of the tokens, the same numbers on any number of ranks; K's are large enough that some tokens count for more than others."""
        k, v = (random((900, part), context, shape.kv_heads, shape.dim, device=device) for part in range(2))
        return [rows[self.tokens.start : self.tokens.stop, self.kv_heads] for rows in (3 * k, v)]


class PlanAttention:
    """The caches of all layers on a GPU, in pages of torch's, for CUDA graphs."""

    def __init__(self, rank: Rank, shape: Shape, layers: int, format: str, batch: int, context: int, share: Share) -> None:
        self.share, self.is_newest, device = share, share.has_newest(context), rank.device
        tokens = len(share.tokens)
        kv_heads = share.kv_heads.stop - share.kv_heads.start
        heads = dict(heads=shape.heads // shape.kv_heads * kv_heads, kv_heads=kv_heads, dim=shape.dim, device=device)
        self.plan = attn.torch.Plan(format, q_lens=[1] * batch, max_kv_len=share.longest, spans=share.is_by_tokens, **heads)
        pages = -(-share.longest // PAGE)
        slots = self.plan.residual_slots(1)
        self.own = pages + slots
        # A sequence has its pages, then its residual pages.
        first = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * self.own
        self.table = first + torch.arange(pages, dtype=torch.int32, device=device)
        self.residuals: Optional[torch.Tensor] = first + pages + torch.arange(slots, dtype=torch.int32, device=device) if slots else None
        lens = (tokens, share.before, share.after)
        self.kv_lens, self.before, self.after = (torch.full((batch,), n, dtype=torch.int32, device=device) for n in lens)
        self.pools = [self.plan.new_pool(batch * self.own) for _ in range(layers)]
        if tokens:
            self._fill(format, heads, share.rows(shape, context, device))
            # Where the newest token of each sequence lies, which steps write again.
            at = tokens - 1
            self.slots = self.table[:, at // PAGE].long() * PAGE + at % PAGE
            # A copy begins where launches want it to.
            self.residual = None if self.residuals is None else self.residuals[:, self.plan.residual_slot(at // PAGE, slots)].clone()

    def _fill(self, format: str, heads: dict, rows: List[torch.Tensor]) -> None:
        """Random tokens in every sequence: one is quantized, the others copy its pages."""
        tokens = rows[0].shape[0]
        one = attn.torch.Plan(format, q_lens=[1], max_kv_len=tokens, **heads)
        token = torch.arange(tokens, device=self.table.device)
        slots = self.table[0, token // PAGE].long() * PAGE + token % PAGE
        residuals = None
        if self.residuals is not None:
            count, first = self.residuals.shape[1], one.first_residual_pages
            page = token // PAGE
            kept = (page < first) | (page > page[-1] - (count - first))
            residuals = torch.where(kept, self.residuals[0, one.residual_slot(page, count)], -1).int()
        for pool in self.pools:
            one.append_slots(*(x.contiguous() for x in rows), pool, slots, residuals)
            pool.view(-1, self.own, pool.shape[1])[1:] = pool[: self.own]
        one.close()

    def begin(self) -> None:
        pass

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Appends a token of each sequence, and attends."""
        return self.plan.step(q, k, v, self.pools[layer], self.table, self.kv_lens, self.residuals)

    def states(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Appends a token of each sequence, if it is this rank's, and attends this rank's: the states of their spans."""
        pool = self.pools[layer]
        if self.is_newest:
            self.plan.append_slots(k, v, pool, self.slots, self.residual)
        return self.plan.attend_spans(q.contiguous(), pool, self.table, self.kv_lens, self.after, self.residuals, self.before)

    def close(self) -> None:
        self.plan.close()


class CacheAttention:
    """The caches of all layers on the CPU, in one `attn.Cache`, to try the program."""

    def __init__(self, rank: Rank, shape: Shape, layers: int, format: str, batch: int, context: int, share: Share) -> None:
        self.batch, self.share, self.is_newest, tokens = batch, share, share.has_newest(context), len(share.tokens)
        options = dict(heads=share.kv_heads.stop - share.kv_heads.start, dim=shape.dim, max_tokens=tokens, layers=layers, device="cpu")
        # As the pools on GPUs have none.
        options["centres"] = False
        self.cache = attn.Cache(format, sequences=batch, **options)
        before = tokens - self.is_newest
        k, v = (x[:before] for x in share.rows(shape, context, rank.device))
        self.cache.reserve([0], [before])
        for layer in range(layers):
            self.cache.write(layer, k, v)
        for sequence in range(1, batch):
            self.cache.fork(0, sequence)
        self.before = before

    def begin(self) -> None:
        """The newest token is written again by every step."""
        if self.is_newest:
            for sequence in range(self.batch):
                self.cache.truncate(sequence, self.before)
            self.cache.reserve(range(self.batch), [1] * self.batch)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.cache.write(layer, k, v)
        return self.cache.attend(q, layer=layer, sequences=range(self.batch), q_lens=[1] * self.batch)

    def states(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        if self.is_newest:
            self.cache.write(layer, k, v)
        shards = dict(tokens_before=[self.share.before] * self.batch, tokens_after=[self.share.after] * self.batch, spans=self.share.spans)
        return self.cache.attend_spans(q, layer=layer, sequences=range(self.batch), q_lens=[1] * self.batch, **shards)

    def close(self) -> None:
        pass


class Step:
    """The cache of a batch, and a step over it, on a GPU in a graph."""

    def __init__(self, rank: Rank, shape: Shape, layers: List[Layer], format: str, batch: int, context: int, options: argparse.Namespace) -> None:
        self.rank, self.shape, self.layers, self.format = rank, shape, layers, format
        self.sums = torch.bfloat16 if options.sums == "bfloat16" else torch.float32
        device, share = rank.device, Share.of(rank, shape, context, options.context_parallel)
        self.is_by_tokens = share.is_by_tokens
        make = PlanAttention if device.type == "cuda" else CacheAttention
        self.attention = make(rank, shape, len(layers), format, batch, context, share)
        self.x = random((901,), batch, shape.hidden, device=device)
        angle = context * 10000.0 ** (-torch.arange(0, shape.dim, 2, device=device) / shape.dim)
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.graph: Optional[torch.cuda.CUDAGraph] = self._captured() if device.type == "cuda" else None

    def _attended(self, layer: int, qkv: List[torch.Tensor]) -> torch.Tensor:
        """From a rank's part of a layer's projections to its heads' results, `[batch, heads · dim]`."""
        shape, rank, batch = self.shape, self.rank, qkv[0].shape[0]
        heads, kv_heads = shape.heads // rank.count, shape.kv_heads // rank.count
        q, k, v = (x.view(batch, -1, shape.dim) for x in qkv)
        q, k = rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin)
        if not self.is_by_tokens:
            return self.attention.run(layer, q, k, v).reshape(batch, -1)
        # One collective for the three.
        everyone = rank.gathered(torch.cat([q, k, v], 1), 1).view(batch, rank.count, -1, shape.dim)
        q, k, v = (x.reshape(batch, -1, shape.dim) for x in everyone.split([heads, kv_heads, kv_heads], 2))
        states = self.attention.states(layer, q, k, v)
        out, _ = attn.distributed.merge_spans_over(self.format, *states, kv_heads=shape.kv_heads, own_heads=True, dtype=q.dtype)
        return out.reshape(batch, -1)

    def run(self) -> torch.Tensor:
        """A step: hidden states in, hidden states out."""
        x = self.x
        self.attention.begin()
        for index, layer in enumerate(self.layers):
            out = self._attended(index, layer.qkv.groups(normed(x)))
            x = (x + layer.o.total(out, self.sums)).bfloat16()
            gate, up = layer.up.groups(normed(x))
            x = (x + layer.down.total(torch.nn.functional.silu(gate) * up, self.sums)).bfloat16()
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
        """The median of `steps` steps."""
        times = []
        for i in range(steps + 3):
            if self.graph is None:
                start = time.perf_counter()
                self.out = self.run()
                took = 1e3 * (time.perf_counter() - start)
            else:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.graph.replay()
                end.record()
                end.synchronize()
                took = start.elapsed_time(end)
            if i >= 3:
                times.append(took)
        return sorted(times)[len(times) // 2]

    def tokens(self) -> List[int]:
        """The most probable token of each of the first rows, under a random head."""
        head = random((902,), self.shape.hidden, self.shape.vocabulary, device=self.rank.device)
        x = normed(self.out[:8]).float()
        # In 32 bits, for ties are rare there; in parts, for the cache may have left little room.
        return torch.cat([x @ part.float() for part in head.split(2000, 1)], 1).argmax(-1).tolist()

    def digest(self) -> str:
        """Of the bits of all rows."""
        return hashlib.sha256(self.out.view(torch.int16).cpu().numpy().tobytes()).hexdigest()[:16]

    def close(self) -> None:
        self.attention.close()


def measured(rank: Rank, shape: Shape, layers: List[Layer], format: str, batch: int, context: int, options: argparse.Namespace) -> dict:
    share = Share.of(rank, shape, context, options.context_parallel)
    needed = cache_bytes(shape, len(layers), format, batch, share.kv_heads.stop - share.kv_heads.start, share.longest)
    row = dict(format=format, batch=batch, context=context, gpus=rank.count, by="tokens" if share.is_by_tokens else "heads", cache_gb=needed / 1e9, ms=None)
    free = torch.cuda.mem_get_info()[0] if rank.device.type == "cuda" else float("inf")
    if rank.least(free - needed) > STEP_BYTES:
        step = Step(rank, shape, layers, format, batch, context, options)
        row["ms"] = step.milliseconds(options.steps)
        row["tokens"], row["digest"] = step.tokens(), step.digest()
        step.close()
        del step
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
    return row


def write(rows: List[dict], path: Optional[str]) -> None:
    if path:
        with open(path, "w") as file:
            file.write("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser.add_argument("--formats", default="bf16,int8,int4", type=lambda text: text.split(","))
    parser.add_argument("--batch", default="1,16,64,256", type=numbers)
    parser.add_argument("--context", default="2048,4096,8192,16384", type=numbers)
    parser.add_argument("--context-parallel", action="store_true", help="shard the cache's tokens over the ranks, not its heads")
    sums = "what all-reduces add up (float32 is twice the bytes), or sums in one order: the same bits on any number of GPUs"
    parser.add_argument("--sums", default="bfloat16", choices=["bfloat16", "float32", "ordered"], help=sums)
    parser.add_argument("--layers", type=int, help="80, or 2 of the tiny shape")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the program")
    parser.add_argument("--json", help="a file for the rows")
    parser.add_argument("--predict", action="store_true", help="print the milliseconds and bytes that H200s should take, and run nothing")
    options = parser.parse_args()
    shape = TINY if options.tiny else Shape()
    if options.predict:
        rows = predictions(shape, options.formats, options.batch, options.context, options.context_parallel)
        for row in rows:
            took = "does not fit" if row["ms"] is None else f"{row['ms']:8.1f} ms"
            print("{format:6} batch {batch:4} context {context:6} on {gpus}: {took:>12}, weights {weights_gb:5.1f} GB, cache {cache_gb:7.2f} GB".format(took=took, **row))
        return write(rows, options.json)
    rank = Rank.of_environment(options.device)
    layers = [Layer(rank, shape, index, options.sums == "ordered") for index in range(options.layers or shape.layers)]
    name, weights = "CPU", ""
    if options.device == "cuda":
        name, weights = torch.cuda.get_device_name(), f", weights {torch.cuda.memory_allocated() / 1e9:.1f} GB on each GPU"
    rank.say(f"{rank.count} x {name}, {len(layers)} layers{weights}")
    rows = []
    for context in options.context:
        for batch in options.batch:
            for format in options.formats:
                row = measured(rank, shape, layers, format, batch, context, options)
                rows.append(row)
                took = "does not fit" if row["ms"] is None else f"{row['ms']:8.2f} ms"
                says = "" if row["ms"] is None else f", tokens {row['tokens']}, digest {row['digest']}"
                rank.say(f"{format:6} batch {batch:4} context {context:6}: {took:>12}, cache {row['cache_gb']:7.2f} GB on each GPU{says}")
                # After each, so that a run that ends early leaves what it has.
                if rank.index == 0:
                    write(rows, options.json)
    if rank.count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
