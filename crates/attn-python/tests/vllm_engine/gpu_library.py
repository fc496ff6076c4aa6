"""Stands for vLLM's compiled library and its FlashAttention on a GPU where vLLM's Python files lie alone (`.ci/vllm --bundle`), as `vllm/_C_stable_libtorch.py`.

What it is asked whether it supports, it does not; the functions that vLLM needs all the same are torch's.
"""

import os
import sys
import types

import torch


def get_cuda_view_from_cpu_tensor(tensor):
    """Pinned memory as a CUDA tensor: it has one address for host and device."""
    assert tensor.is_pinned() and tensor.is_contiguous()
    address = {"shape": tuple(tensor.shape), "typestr": tensor.numpy().dtype.str, "data": (tensor.data_ptr(), False), "version": 2, "strides": None}
    view = torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=address), device="cuda")
    view._host_tensor = tensor
    return view


def silu_and_mul(out, x):
    gate, factor = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * factor)


def vocab_parallel_embedding(out, ids, weight, first, end, padding, first_added, end_added):
    """Rows of this GPU's part of the vocabulary, zeros for the others'."""
    own, added = (ids >= first) & (ids < end), (ids >= first_added) & (ids < end_added)
    at = torch.where(own, ids - first, torch.where(added, ids - first_added + (end - first) + padding, 0))
    out.copy_(torch.nn.functional.embedding(at, weight) * (own | added).unsqueeze(-1))


def get_max_shared_memory_per_block_device_attribute(device):
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def absent(name):
    def call(*_args, **_named):
        raise NotImplementedError(f"{name} is of vLLM's compiled library, which is not here")

    return call


FUNCTIONS = {
    function.__name__: function
    for function in (get_cuda_view_from_cpu_tensor, get_max_shared_memory_per_block_device_attribute, silu_and_mul, vocab_parallel_embedding)
}
NAMED = ("rms_norm", "fused_add_rms_norm", "rotary_embedding", "reshape_and_cache_flash")


class Operators(type(torch.ops._C)):
    def __getattr__(self, name):
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if name in NAMED:
            return absent(name)
        if "support" in name:
            return lambda *_args, **_named: False
        return super().__getattr__(name)


class FlashAttention(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)


for namespace in (torch.ops._C, torch.ops._C_cuda_utils):
    namespace.__class__ = Operators
flash = FlashAttention("vllm.vllm_flash_attn")
flash.__path__ = [os.path.join(os.path.dirname(__file__), "vllm_flash_attn")]
sys.modules["vllm.vllm_flash_attn"] = flash
