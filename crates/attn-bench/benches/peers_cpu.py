#!/usr/bin/env python3
"""This library and others on a CPU, on shapes of decode steps or of one prompt.

    python3 crates/attn-bench/benches/peers_cpu.py --attn target/release/attn --threads 2 --csv docs/data/cpu-peers.csv
    python3 crates/attn-bench/benches/peers_cpu.py --threads 1,2 --shapes "1×32/8×128×4096" --q-len 512 --peers torch

A shape is sequences × query heads/KV heads × dim × context. Each library has a process of its own, and they take turns; between two there is a
pause, in which the threads of the last one fall asleep. K and V are cold: each step takes the next of copies that make up 192 MiB. Every
result is compared with attention in f64 over the same K and V before they were quantized.

`pip install numpy torch==2.11.0 openvino==2026.4.1`. `--ggml DIR` names the folder of libggml-base.so and libggml-cpu.so; the sources of
llama-cpp-python have them: cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF; cmake --build build -t ggml.
More query tokens than one are the last of the context, causal, and only torch takes them.
"""

import argparse
import csv
import ctypes
import json
import multiprocessing
import pathlib
import re
import subprocess
import sys
import time
import traceback

import numpy as np

SHAPES = [
    "1×32/8×128×1024", "1×32/8×128×8192", "1×32/8×128×32768", "1×8/1×128×131072",
    "8×32/8×128×4096", "1×9/3×64×2048", "1×28/4×128×8192", "1×16/16×64×4096",
]  # fmt: skip
FORMATS = "int8,int4,int4-g1,int8/int4,bf16,f16,fp8"
COLD_BYTES = 192 << 20
PAUSE_S = 0.02
# The largest error that a result may have, as a share of the largest element, by bits of the cache. torch and OpenVINO stay below 0.006 at
# 16 bits; llama.cpp, which adds up values in f16, has 0.01 at ctx 1024 and 0.09 at ctx 131072.
MOST_ERROR = {16: 0.1, 8: 0.03, 4: 0.25}


class Work:
    """A shape with its query tokens, and inputs for it: q [batch, q_heads, q_len, dim], k and v [batch, kv_heads, ctx, dim]."""

    def __init__(self, shape, q_len):
        self.shape, self.q_len = shape, q_len
        self.batch, self.q_heads, self.kv_heads, self.dim, self.ctx = map(int, re.split("[×/]", shape))
        self.group = self.q_heads // self.kv_heads

    def inputs(self):
        noise = np.random.default_rng(1)
        size = lambda heads, tokens: (self.batch, heads, tokens, self.dim)
        q = noise.standard_normal(size(self.q_heads, self.q_len), np.float32)
        k, v = (noise.standard_normal(size(self.kv_heads, self.ctx), np.float32) for _ in range(2))
        return q, k, v

    def copies(self, bytes_per_element):
        elements = 2 * self.batch * self.kv_heads * self.ctx * self.dim
        return -(-COLD_BYTES // int(elements * bytes_per_element))

    def mask(self):
        """Which tokens each query token sees, [q_len, ctx]."""
        return np.tri(self.q_len, self.ctx, self.ctx - self.q_len, bool)

    def flops(self):
        return 4 * int(self.mask().sum()) * self.batch * self.q_heads * self.dim

    def error(self, out, inputs):
        """The largest difference from attention in f64, as a share of the largest element."""
        most = largest = 0.0
        for q, k, v, got in zip(*inputs, out):
            for head in range(self.q_heads):
                keys, values = (x[head // self.group].astype(np.float64) for x in (k, v))
                scores = q[head].astype(np.float64) @ keys.T / self.dim**0.5
                weights = np.exp(scores - scores.max()) * self.mask()
                right = weights @ values / weights.sum(1, keepdims=True)
                most, largest = max(most, np.abs(right - got[head]).max()), max(largest, np.abs(right).max())
        return most / largest


class Torch:
    """`scaled_dot_product_attention`; K and V are contiguous, [batch, kv_heads, ctx, dim].

    The query heads of a KV head are the rows of one query in decode steps: `enable_gqa` takes 7 times as long at ctx 1024.
    """

    def __init__(self, _):
        import torch

        self.torch = torch
        self.version = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"

    def prepare(self, work, inputs, threads):
        torch, attend = self.torch, self.torch.nn.functional.scaled_dot_product_attention
        torch.set_num_threads(threads)
        steps = {}
        for dtype in [torch.bfloat16] if work.q_len == 1 else [torch.bfloat16, torch.float32]:
            name = f"torch SDPA {str(dtype)[6:].replace('bfloat16', 'bf16').replace('float32', 'f32')}"
            q, k, v = (torch.from_numpy(x).to(dtype) for x in inputs)
            kvs = [(k.clone(), v.clone()) for _ in range(work.copies(k.itemsize))]
            if work.q_len == 1:
                folded = q.reshape(work.batch, work.kv_heads, work.group, work.dim)
                steps[f"{name}, folded"] = lambda i, q=folded, kvs=kvs: attend(q, *kvs[i % len(kvs)])
                continue
            # torch's own flag puts the diagonal at the first token: right where the prompt is the whole context.
            mask = {"is_causal": True} if work.q_len == work.ctx else {"attn_mask": torch.from_numpy(work.mask())}
            repeated = [[x.repeat_interleave(work.group, 1) for x in kv] for kv in kvs]
            steps[f"{name}, enable_gqa"] = lambda i, q=q, kvs=kvs, m=mask: attend(q, *kvs[i % len(kvs)], enable_gqa=True, **m)
            steps[f"{name}, heads copied"] = lambda i, q=q, kvs=repeated, m=mask: attend(q, *kvs[i % len(kvs)], **m)
        return steps

    def array(self, out):
        return out.float().numpy()


class OpenVino:
    """PagedAttention of the CPU plugin; pages of 32 tokens in random order. A step also writes its token's K and V."""

    BLOCK = 32
    TYPES = {"bf16": 2, "u8": 1, "u4": 0.5}

    def __init__(self, _):
        import openvino

        self.version = f"OpenVINO {openvino.__version__}"
        self.openvino = openvino

    def model(self, work, kind, threads):
        from openvino.op import Constant, Parameter, Result, _PagedAttentionExtension

        ov = self.openvino
        f32, i32 = np.float32, np.int32
        given = []

        def parameter(name, element, *shape):
            given.append(Parameter(element, ov.PartialShape(shape)))
            given[-1].output(0).tensor.set_names({name})
            return given[-1].output(0)

        def constant(value, element):
            return Constant(np.array(value, element)).output(0)

        floats, ints, bytes_ = (constant([], element) for element in (f32, i32, np.uint8))
        heads = (work.q_heads, work.kv_heads, work.kv_heads)
        op = _PagedAttentionExtension([
            *(parameter(name, ov.Type.f32, -1, n * work.dim) for name, n in zip(("query", "key", "value"), heads)),
            *(parameter(name, ov.Type.dynamic, -1, -1, -1, -1) for name in ("key_cache", "value_cache")),
            *(parameter(name, ov.Type.i32, -1) for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")),
            constant(work.dim**-0.5, f32), constant(0, i32), floats,  # scale, sliding_window, alibi_slopes
            parameter("max_context_len", ov.Type.i32), ints,  # , score_aggregation_window
            ints, constant(np.zeros((0, 0)), i32), constant(np.zeros((0, 0)), f32),  # rotations
            floats, constant(0, i32), constant(0, i32),  # xattention
            floats,  # sinks
            constant(0, i32), ints, ints, ints,  # adaptive_rkv
            ints, bytes_, ints,  # token_type_ids, qq_bias
        ])  # fmt: skip
        for name, value in zip(("num_k_heads", "k_head_size", "num_v_heads", "v_head_size"), [work.kv_heads, work.dim] * 2):
            op.get_rt_info()[name] = value
        config = {"KV_CACHE_PRECISION": kind, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        # By default a bf16 cache is computed in bf16, the faster way here; the others in f32.
        config["INFERENCE_PRECISION_HINT"] = "bf16" if kind == "bf16" else "f32"
        return ov.Core().compile_model(ov.Model([Result(op.output(0))], given, "step"), "CPU", config)

    def request(self, work, model, caches, qkv, past, blocks):
        """A request for as many new tokens per sequence as `qkv` has beyond the batch, behind `past` tokens."""
        ov = self.openvino
        request = model.create_infer_request()
        sequences, new = len(blocks), len(qkv[0]) // len(blocks)
        ints = lambda x: np.array(x, np.int32)
        values = {
            **dict(zip(("query", "key", "value"), qkv)),
            "past_lens": ints([past] * sequences),
            "subsequence_begins": ints(np.arange(sequences + 1) * new),
            "block_indices": ints(blocks.ravel()),
            "block_indices_begins": ints(np.arange(sequences + 1) * blocks.shape[1]),
            "max_context_len": ints(past + new),
        }
        for name, value in values.items():
            request.set_tensor(name, ov.Tensor(value))
        for name, cache in zip(("key_cache", "value_cache"), caches):
            request.set_tensor(name, cache)
        return request

    def prepare(self, work, inputs, threads):
        ov, steps = self.openvino, {}
        q, k, v = inputs
        tokens = lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(-1, x.shape[1] * work.dim)
        k, v = tokens(k), tokens(v)
        last = np.arange(work.batch) * work.ctx + work.ctx - 1
        pages = work.ctx // self.BLOCK
        for kind, element_bytes in self.TYPES.items():
            model = self.model(work, kind, threads)
            copies = work.copies(element_bytes)
            order = np.random.default_rng(2).permutation(copies * work.batch * pages).reshape(copies, work.batch, pages)
            caches = []
            for name in ("key_cache", "value_cache"):
                port = model.input(name)
                shape = [order.size, *(d.get_length() for d in list(port.partial_shape)[1:])]
                caches.append(ov.Tensor(port.element_type, ov.Shape(shape)))
            # Every page is filled as a sequence of its own, since pages do not say where in a context they lie.
            zeros = np.zeros((len(k), q.shape[1] * work.dim), np.float32)
            for copy in order:
                self.request(work, model, caches, (zeros, k, v), 0, copy.reshape(-1, 1)).infer()
            one = (tokens(q), k[last], v[last])
            requests = [self.request(work, model, caches, one, work.ctx - 1, copy) for copy in order]

            def step(i, requests=requests):
                request = requests[i % len(requests)]
                request.infer()
                return request.get_output_tensor(0).data

            steps[f"OpenVINO PA {kind}"] = step
        return steps

    def array(self, out):
        return out


class Ggml:
    """llama.cpp's `ggml_flash_attn_ext` without a mask; K and V are contiguous, [batch, kv_heads, ctx, dim]."""

    TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}

    class Init(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    class Plan(ctypes.Structure):
        _fields_ = [
            ("work_size", ctypes.c_size_t), ("work", ctypes.c_void_p), ("threads", ctypes.c_int), ("pool", ctypes.c_void_p),
            ("abort", ctypes.c_void_p), ("abort_data", ctypes.c_void_p),
        ]  # fmt: skip

    def __init__(self, folder):
        if not folder:
            raise ValueError("--ggml names no folder")
        base, cpu = (ctypes.CDLL(str(pathlib.Path(folder) / f"libggml-{name}.so"), ctypes.RTLD_GLOBAL) for name in ("base", "cpu"))
        pointer, size, whole = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        self.calls = {}
        for library, name, result, takes in [
            (base, "ggml_init", pointer, [self.Init]),
            (base, "ggml_free", None, [pointer]),
            (base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, whole, whole, whole, whole]),
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_row_size", size, [ctypes.c_int, whole]),
            (base, "ggml_quantize_chunk", size, [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]),
            (base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [ctypes.c_float] * 3),
            (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (cpu, "ggml_cpu_init", None, []),
            (cpu, "ggml_graph_plan", self.Plan, [pointer, ctypes.c_int, pointer]),
            (cpu, "ggml_graph_compute", ctypes.c_int, [pointer, ctypes.POINTER(self.Plan)]),
        ]:  # fmt: skip
            call = getattr(library, name)
            call.restype, call.argtypes = result, takes
            self.calls[name] = call
        self.calls["ggml_cpu_init"]()
        self.contexts = []
        self.version = f"ggml of {folder}"

    def prepare(self, work, inputs, threads):
        call, steps = self.calls, {}
        while self.contexts:
            call["ggml_free"](self.contexts.pop())
        q, k, v = inputs
        for kind, number in self.TYPES.items():
            row = call["ggml_row_size"](number, work.dim)
            copies = work.copies(row / work.dim)
            context = call["ggml_init"](self.Init(copies * (2 * row * k.size // work.dim + 4 * q.size * 2 + (1 << 20)) + (16 << 20), None, False))
            self.contexts.append(context)
            graphs = [self.graph(context, number, work, inputs) for _ in range(copies)]
            plan = call["ggml_graph_plan"](graphs[0][0], threads, None)
            scratch = ctypes.create_string_buffer(plan.work_size + 64)
            plan.work = ctypes.addressof(scratch)

            def step(i, graphs=graphs, plan=plan, keep=scratch):
                graph, out = graphs[i % len(graphs)]
                if call["ggml_graph_compute"](graph, ctypes.byref(plan)):
                    raise RuntimeError("ggml_graph_compute failed")
                return work, out

            steps[f"llama.cpp FA {kind}"] = step
        return steps

    def graph(self, context, number, work, inputs):
        call = self.calls
        tensors = []
        for x, kind in zip(inputs, (0, number, number)):
            tensor = call["ggml_new_tensor_4d"](context, kind, *reversed(x.shape))
            data, x = call["ggml_get_data"](tensor), np.ascontiguousarray(x)
            if kind == 0:
                ctypes.memmove(data, x.ctypes.data, x.nbytes)
            else:
                call["ggml_quantize_chunk"](kind, x.ctypes.data, data, 0, x.size // work.dim, work.dim, None)
            tensors.append(tensor)
        out = call["ggml_flash_attn_ext"](context, *tensors, None, work.dim**-0.5, 0.0, 0.0)
        graph = call["ggml_new_graph"](context)
        call["ggml_build_forward_expand"](graph, out)
        return graph, call["ggml_get_data"](out)

    def array(self, out):
        work, data = out
        size = work.batch * work.q_len * work.q_heads * work.dim
        flat = np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), (size,))
        return flat.reshape(work.batch, work.q_len, work.q_heads, work.dim).transpose(0, 2, 1, 3)


PEERS = {"torch": Torch, "openvino": OpenVino, "ggml": Ggml}


def bits(name):
    return 4 if re.search("u4|q4", name) else 8 if re.search("u8|q8", name) else 16


def serve(pipe, name, argument):
    """A peer's process: prepares works and times steps as the other end of the pipe asks, until it asks for nothing."""
    try:
        peer = PEERS[name](argument)
        pipe.send(peer.version)
        steps, next_copy = {}, {}
        while (ask := pipe.recv()) is not None:
            if isinstance(ask[0], Work):
                work, threads = ask
                steps.clear()
                inputs = work.inputs()
                steps.update(peer.prepare(work, inputs, threads))
                next_copy = dict.fromkeys(steps, 0)
                shape = (work.batch, work.q_heads, work.q_len, work.dim)
                pipe.send({s: work.error(np.array(peer.array(step(0)), np.float32).reshape(shape), inputs) for s, step in steps.items()})
                continue
            step, count = ask
            times = []
            for i in range(next_copy[step], next_copy[step] + count + 1):
                start = time.perf_counter()
                steps[step](i)
                times.append((time.perf_counter() - start) * 1e6)
            next_copy[step] += count + 1
            pipe.send(times[1:])
    except Exception:
        pipe.send(RuntimeError(f"{name}:\n{traceback.format_exc()}"))


class Peer:
    """This end of a peer's process."""

    def __init__(self, name, argument):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other, name, argument), daemon=True)
        self.process.start()

    def ask(self, *what):
        self.pipe.send(what)
        return self.answer()

    def answer(self):
        got = self.pipe.recv()
        if isinstance(got, Exception):
            sys.exit(str(got))
        return got


def time_ours(args, work, threads):
    """Microseconds of each format, and of a read of as many bytes: minimum and median of a run of `attn bench`."""
    heads = f"{work.q_heads}/{work.kv_heads}"
    command = [args.attn, "bench", "--json", "--backend", "cpu", "--threads", threads, "--runs", args.steps, "--batch", work.batch, "--large"]
    command += ["--heads", heads, "--dim", work.dim, "--ctx", work.ctx, "--q-len", work.q_len, "--kv", args.kv]
    rows = json.loads(subprocess.run([str(x) for x in command], check=True, stdout=subprocess.PIPE).stdout)
    return {f"attn {row['shape'].split('/', 2)[2]}": [row[key] for key in ("us_min", "us_median", "read_us_min", "read_us_median")] for row in rows}


def measure(args, peers, work, threads):
    """Rows of the table: library, microseconds minimum and median, the same of a read or two blanks."""
    times, ours = {}, {}
    for peer in peers.values():
        for name, error in peer.ask(work, threads).items():
            print(f"{work.shape}, {threads} threads, {name}: error {error:.2g}", file=sys.stderr, flush=True)
            if not error < MOST_ERROR[bits(name)]:
                sys.exit(f"{name} differs from attention in f64 by {error:.2g} of its largest element, allowed {MOST_ERROR[bits(name)]}")
            times[name] = (peer, [])
    for _ in range(args.rounds):
        if args.attn:
            for name, figures in time_ours(args, work, threads).items():
                ours.setdefault(name, []).append(figures)
        for name, (peer, all_of_it) in times.items():
            time.sleep(PAUSE_S)
            all_of_it += peer.ask(name, args.steps)
    rows = []
    for name, rounds in ours.items():
        columns = list(zip(*rounds))
        rows.append([name, *(float(of(column)) for of, column in zip([min, np.median] * 2, columns))])
    rows += [[name, min(all_of_it), float(np.median(all_of_it)), "", ""] for name, (_, all_of_it) in times.items()]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attn", help="this library's program; without it the peers alone are timed")
    parser.add_argument("--kv", default=FORMATS, help="this library's formats")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS), help="of torch, openvino and ggml")
    parser.add_argument("--ggml", help="the folder of libggml-base.so and libggml-cpu.so")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=SHAPES)
    parser.add_argument("--q-len", type=int, default=1, help="query tokens")
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[2])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each library")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a turn")
    parser.add_argument("--csv", type=pathlib.Path, help="write the figures into this file, in place of what it has of the same shapes and threads")
    args = parser.parse_args()
    if args.q_len > 1 and args.peers != ["torch"]:
        parser.error("of several query tokens torch alone is timed: --peers torch")
    peers = {name: Peer(name, args.ggml) for name in args.peers}
    for peer in peers.values():
        print(peer.answer(), file=sys.stderr)
    head = ["shape", "threads", "library", "us_min", "us_median", "read_us_min", "read_us_median"]
    print("| " + " | ".join(head) + " | TFLOP/s |\n" + "|---" * (len(head) + 1) + "|", flush=True)
    for threads in args.threads:
        for shape in args.shapes:
            work, rows = Work(shape, args.q_len), []
            for name, *figures in measure(args, peers, work, threads):
                rows.append([shape, str(threads), name, *(x and f"{x:.1f}" for x in figures)])
                print("| " + " | ".join(rows[-1]) + f" | {work.flops() / figures[0] / 1e6:.3f} |", flush=True)
            if args.csv:
                keep = []
                if args.csv.exists():
                    keep = [row for row in list(csv.reader(args.csv.open(newline="")))[1:] if row[:2] != [shape, str(threads)]]
                with args.csv.open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([head, *keep, *rows])
    for peer in peers.values():
        peer.pipe.send(None)


if __name__ == "__main__":
    main()
