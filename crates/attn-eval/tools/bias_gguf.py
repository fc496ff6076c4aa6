#!/usr/bin/env python3
"""Writes a GGUF model again, with biases of K: a constant before the rotary positions, as the models of Qwen 2 have.

    bias_gguf.py MODEL.gguf OUT.gguf --norm 300 --pairs slow|middle|FIRST-LAST [--unread]

Every KV head of every layer gets a bias of this norm, spread evenly over the named rotary pairs: `slow` are the five that turn slowest, `middle`
the five around the middle of all pairs. The model has the architecture llama and no biases of K; the standard library is enough.

The bias changes the model's own predictions, since its queries were not trained with it. With --unread, the queries' weights of the named pairs are 0,
so that no score depends on these pairs: the model is the same one for each norm, and the constant is in the keys all the same.
"""

import argparse
import math
import struct

# Formats of the metadata's values of fixed size, by the number of their type.
FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# Elements and bytes of a block, by the number of the tensor's type.
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110),
          12: (256, 144), 13: (256, 176), 14: (256, 210), 30: (1, 2)}
F32 = 0


class Header:
    """What stands before a file's tensors."""

    def __init__(self, data):
        self.data, self.at = data, 0
        magic, version, tensors, keys = self.take("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise SystemExit("the file is no GGUF file of version 2 or 3")
        self.version, self.keys = version, keys
        first = self.at
        self.metadata = dict(self.entry() for _ in range(keys))
        self.metadata_bytes = data[first:self.at]
        self.tensors = [self.tensor() for _ in range(tensors)]
        self.alignment = self.metadata.get("general.alignment", 32)
        self.start = aligned(self.at, self.alignment)

    def take(self, form):
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def text(self):
        (length,) = self.take("<Q")
        self.at += length
        return bytes(self.data[self.at - length:self.at]).decode()

    def value(self, kind):
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            kind, length = self.take("<IQ")
            return [self.value(kind) for _ in range(length)]
        return self.take("<" + FIXED[kind])[0]

    def entry(self):
        key = self.text()
        return key, self.value(*self.take("<I"))

    def tensor(self):
        name = self.text()
        (dims,) = self.take("<I")
        shape = self.take(f"<{dims}Q")
        return (name, shape, *self.take("<IQ"))


def aligned(n, alignment):
    return -(-n // alignment) * alignment


def size(shape, kind):
    elements, size = BLOCKS[kind]
    return math.prod(shape) // elements * size


def text(name):
    return struct.pack("<Q", len(name.encode())) + name.encode()


def chosen(pairs, words):
    """The first rotary pair that has a part of the bias, and the one behind the last."""
    if words == "slow":
        return max(pairs - 5, 0), pairs
    if words == "middle":
        return pairs // 2 - 2, pairs // 2 + 3
    first, last = map(int, words.split("-"))
    if not 0 <= first <= last < pairs:
        raise SystemExit(f"--pairs is {words}; allowed: pairs from 0 to {pairs - 1}, or slow, or middle")
    return first, last + 1


def main():
    parser = argparse.ArgumentParser(description="Writes a GGUF model of the architecture llama again, with biases of K.")
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--norm", type=float, required=True, help="the norm of each KV head's bias")
    parser.add_argument("--pairs", default="slow", help="slow, middle, or FIRST-LAST; pair 0 turns fastest")
    parser.add_argument("--unread", action="store_true", help="queries are 0 in these pairs")
    args = parser.parse_args()
    with open(args.model, "rb") as file:
        data = bytearray(file.read())
    header = Header(data)
    if header.metadata["general.architecture"] != "llama":
        raise SystemExit("the model's architecture is not llama")
    if any(name.endswith("attn_k.bias") for name, *_ in header.tensors):
        raise SystemExit("the model has biases of K already")
    count = {key: header.metadata[f"llama.{key}"] for key in ("block_count", "embedding_length", "attention.head_count")}
    heads = count["attention.head_count"]
    kv_heads = header.metadata.get("llama.attention.head_count_kv", heads)
    dim = header.metadata.get("llama.attention.key_length", count["embedding_length"] // heads)
    pairs = header.metadata.get("llama.rope.dimension_count", dim) // 2
    first, end = chosen(pairs, args.pairs)
    # Files of this architecture have the two elements of a pair beside each other.
    biased = range(2 * first, 2 * end)
    each = args.norm / math.sqrt(len(biased))
    head = [each if i in biased else 0.0 for i in range(dim)]
    bias = struct.pack(f"<{dim * kv_heads}f", *head * kv_heads)
    body = data[header.start:]
    if args.unread:
        for name, shape, kind, offset in header.tensors:
            if name.endswith("attn_q.weight"):
                # Rows of zero bytes are zeros in every type of blocks.
                row = size(shape, kind) // shape[1]
                for at in (offset + (h * dim + i) * row for h in range(heads) for i in biased):
                    body[at:at + row] = bytes(row)
    body += bytes(aligned(len(body), header.alignment) - len(body))
    tensors = list(header.tensors)
    for layer in range(count["block_count"]):
        tensors.append((f"blk.{layer}.attn_k.bias", (len(bias) // 4,), F32, len(body)))
        body += bias + bytes(aligned(len(bias), header.alignment) - len(bias))
    out = struct.pack("<4sIQQ", b"GGUF", header.version, len(tensors), header.keys) + header.metadata_bytes
    for name, shape, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    out += bytes(aligned(len(out), header.alignment) - len(out))
    with open(args.out, "wb") as file:
        file.write(out + body)
    base = header.metadata.get("llama.rope.freq_base", 1e4)
    periods = [2 * math.pi * base ** (i / pairs) for i in (first, end - 1)]
    print(f"{args.out}: norm {args.norm:g} in the rotary pairs {first} to {end - 1} of {pairs}, whose periods are {periods[0]:.0f} to {periods[1]:.0f} tokens")


if __name__ == "__main__":
    main()
