"""Stands for vLLM's compiled CPU library, as `vllm/_C.py`: what a greedy run with a backend of its own calls of it, and products whose rows do not depend on their number."""

import torch

_usual_linear = torch.nn.functional.linear


def linear(x, weight, bias=None):
    """32 rows at a time. torch's own product sums in other orders for other numbers of rows."""
    rows = x.reshape(-1, x.shape[-1])
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 32))
    out = torch.cat([_usual_linear(part, weight, bias) for part in padded.split(32)])[: len(rows)] if len(rows) else _usual_linear(rows, weight, bias)
    return out.view(*x.shape[:-1], -1)


torch.nn.functional.linear = linear


def init_cpu_memory_env(nodes):
    return None


def greedy_argmax(logits):
    return logits.argmax(dim=-1).view(-1)


def compute_slot_mapping_kernel_impl(starts, positions, table, slots, block):
    for i in range(len(starts) - 1):
        own = positions[starts[i] : starts[i + 1]]
        slots[starts[i] : starts[i + 1]] = table[i, own // block].long() * block + own % block


def silu_and_mul(out, x):
    half = x.shape[-1] // 2
    out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])


def rejection_greedy_sample_kernel_impl(out, ends, drafts, wanted, bonus, is_greedy, most):
    """Of each request's drafted tokens those that the model would have chosen, then its own next one."""
    start = 0
    for i, end in enumerate(ends.tolist()):
        agreed = 0
        while start + agreed < end and drafts[start + agreed] == wanted[start + agreed]:
            agreed += 1
        out[i, :agreed] = wanted[start : start + agreed]
        out[i, agreed] = wanted[start + agreed] if start + agreed < end else bonus.view(-1)[i]
        start = end


OWN = {
    f.__name__: f
    for f in (init_cpu_memory_env, greedy_argmax, compute_slot_mapping_kernel_impl, silu_and_mul, rejection_greedy_sample_kernel_impl)
}


class Operators(type(torch.ops._C)):
    def __getattr__(self, name):
        return OWN[name] if name in OWN else super().__getattr__(name)


torch.ops._C.__class__ = Operators
