"""What `attn.vllm` uses of vLLM, written from the interface of vLLM 0.33.0: names, arguments and what they do, without a line of its code.

`install()` puts them where vLLM's modules would be. `tests/test_vllm.py` compares them with the sources of a vLLM that `ATTN_VLLM_SOURCE` names.
"""

import enum
import sys
import types
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class KVCacheLayout(enum.Enum):
    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)


class KVQuantMode(enum.IntEnum):
    NONE = 0
    CUSTOM = 12


@dataclass(frozen=True)
class AttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    state_content_bytes: Optional[int] = None


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    sliding_window: Optional[int] = None


class AttentionBackend:
    @classmethod
    def validate_configuration(cls, head_size, dtype, kv_cache_dtype, use_mla, device_capability):
        checks = {
            "head_size not supported": head_size in cls.get_supported_head_sizes(),
            "dtype not supported": dtype in cls.supported_dtypes,
            "kv_cache_dtype not supported": cls.supports_kv_cache_dtype(kv_cache_dtype),
            "MLA not supported": not use_mla,
            "compute capability not supported": cls.supports_compute_capability(device_capability),
        }
        return [reason for reason, holds in checks.items() if not holds]


class AttentionMetadata:
    pass


class AttentionImpl:
    pass


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    def _init_reorder_batch_threshold(self, reorder_batch_threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False):
        self.reorder_batch_threshold = reorder_batch_threshold


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True


class AttentionBackendEnum(enum.Enum):
    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


class AttentionSelectorConfig(NamedTuple):
    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: Optional[str]
    use_mla: bool = False


class CpuPlatform:
    def is_cpu(self):
        return True

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return "vllm's own"


current_platform = CpuPlatform()


# Found under vLLM's name, as its pickles name it.
AttentionBackendEnum.__module__ = "vllm.v1.attention.backends.registry"
HANDLERS: dict = {}


def register_backend(backend, class_path=None, is_mamba=False):
    if backend in AttentionBackendEnum.__members__:
        raise ValueError(f"{backend} exists")
    member = object.__new__(AttentionBackendEnum)
    member._name_, member._value_ = backend, class_path
    AttentionBackendEnum._member_map_[backend] = AttentionBackendEnum._value2member_map_[class_path] = member
    return lambda cls: cls


def register_kv_cache_dtype(name):
    def decorate(cls):
        HANDLERS[name] = cls()
        return cls

    return decorate


def get_kv_cache_dtype_handler(name):
    return HANDLERS.get(name)


# vLLM's configuration while it makes an engine.
CURRENT: list = [None]


def get_current_vllm_config_or_none():
    return CURRENT[0]


def install() -> None:
    modules = {
        "vllm": [],
        "vllm.config": [get_current_vllm_config_or_none],
        "vllm.config.cache": [register_kv_cache_dtype, get_kv_cache_dtype_handler],
        "vllm.platforms": [],
        "vllm.v1": [],
        "vllm.v1.attention": [],
        "vllm.v1.attention.backend": [
            AttentionBackend,
            AttentionCGSupport,
            AttentionImpl,
            AttentionMetadata,
            AttentionMetadataBuilder,
            AttentionType,
            CommonAttentionMetadata,
        ],
        "vllm.v1.attention.backends": [],
        "vllm.v1.attention.backends.registry": [AttentionBackendEnum, register_backend],
        "vllm.v1.kv_cache_interface": [KVCacheLayout, KVQuantMode, AttentionSpec, FullAttentionSpec],
    }
    for name, members in modules.items():
        module = sys.modules.setdefault(name, types.ModuleType(name))
        for member in members:
            setattr(module, member.__name__, member)
    sys.modules["vllm.platforms"].current_platform = current_platform
