"""A plugin for vLLM 0.33: int8, int4 and 16-bit KV caches, attended by this library on GPUs and on vLLM's CPU platform.

    vllm serve MODEL --attention-backend ATTN --kv-cache-dtype attn_int8

vLLM finds `register` by the entry point `vllm.general_plugins`. `.ci/vllm` runs the plugin inside the real vLLM 0.33.0 on the CPU; tests/test_vllm.py has its contract
against stubs, and its steps against `attn.Cache`.

What it does and does not:

- For each token and head, `attn_int8` stores 2·dim + 4 bytes, `attn_int8_int4` 1.5·dim + 4, `attn_int4` dim + 8, `attn_bf16` and `auto` 4·dim. Formats with a window
  (`int4`, `int8/int4`) keep finer residuals of a sequence's first and newest tokens, for which vLLM's pages have no place: these have none, so that they are coarser than
  `attn.Cache` of the same bits (docs/accuracy.md).
- Blocks of 64 tokens or more of `attn_int8` and `attn_int8_int4` have room for the centres of K of the sequence whose first block it is (docs/accuracy.md), dim / 16 bytes a token and
  head: they are final when the block is full, and go where it goes. Smaller blocks, and layers whose first blocks vLLM frees (sliding windows in a cache group of their own), have none.
- `auto`, which is what layers have that `--kv-cache-dtype-skip-layers` names, keeps the model's 16 bits.
- A batch of decoding or verifying sequences with as many query tokens each runs in full CUDA graphs; padded requests (length 0, slot -1) give zeros.
- A token's result has the same bits in any batch, chunk or graph (`supports_batch_invariance`).
- Blocks have 64 tokens, a tile of the kernels, unless `--block-size` says otherwise.
- Kernels are loaded and the largest plans made in the pass by which vLLM measures memory, so that they are counted and the first request waits for neither.
- Keys without centres are looked at in a layer's first prompts, and a warning names the layers whose keys a format stores badly, as biases of K are (Qwen 2.5).
- Layers may share the K and V of another (Gemma 3n, 4).
- Refused: encoder attention, MLA, decode and prefill context parallelism, quantized outputs, pages with padding between.
"""

from __future__ import annotations

import copyreg
import logging
import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from . import _attn, _largest_plans
from ._errors import UnsupportedError
from ._host_pages import HostPages
from ._outlier_keys import LOOKED_AT, KeyLook, unevenness
from ._token_places import TokenPlaces
from .torch import Centres, Plan, Scratch

# vLLM's name of a cache type, and the format of its pages.
FORMATS: Dict[str, str] = {"attn_int8": "int8", "attn_int8_int4": "int8/int4-w0", "attn_int4": "int4-g1", "attn_bf16": "bf16"}
# The element type of a cache is all that `customize_spec` learns of its name: each has its own, of one byte.
ELEMENTS: Dict[str, torch.dtype] = {
    "attn_int8": torch.uint8,
    "attn_int8_int4": torch.int8,
    "attn_int4": torch.float8_e5m2,
    "attn_bf16": torch.float8_e4m3fn,
}
# vLLM's cache types of the model's own elements, and the formats of their pages.
AUTO: Tuple[Optional[str], ...] = (None, "auto")
FLOATS: Dict[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "f16"}
BLOCK_SIZES = [16, 32, 64, 128]
PREFERRED_BLOCK = 64
# Formats whose keys lack centres, and the least tokens of a block that holds a first tile.
CENTRED = ("int8", "int8/int4-w0")
FIRST_TILE = 64
HEAD_SIZES = [64, 80, 96, 128, 160, 192, 256, 320, 512]
# Variables that say how long OpenMP's idle threads keep their cores.
IDLE_THREADS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
# Plans of batches outside of graphs that are kept.
_KEPT_PLANS = 16
_LOG = logging.getLogger(__name__)


def register() -> None:
    """Makes the backend `ATTN` and the cache types known to vLLM; may be called any number of times.

    vLLM calls it at every start, whichever backend is asked for, and would not start if it raised: a vLLM with another interface is left as it is, and one
    warning says so.
    """
    try:
        _register()
    except Exception as error:
        _LOG.warning(
            "the attention backend ATTN needs the interface of vLLM 0.33 and is not registered (%s: %s); vLLM works without it",
            type(error).__name__,
            error,
        )


def _register() -> None:
    # Every name is looked up before anything is changed.
    from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import KVQuantMode

    from vllm.platforms import current_platform

    custom = KVQuantMode.CUSTOM

    class Handler:
        name = ""

        def torch_dtype(self) -> torch.dtype:
            return ELEMENTS[self.name]

        def quant_mode(self) -> Any:
            return custom

    for name in FORMATS:
        if get_kv_cache_dtype_handler(name) is None:
            register_kv_cache_dtype(name)(type(f"{name}_handler", (Handler,), {"name": name}))
    if "ATTN" not in AttentionBackendEnum.__members__:
        register_backend("ATTN", f"{__name__}.AttnBackend")
    copyreg.pickle(AttentionBackendEnum, _pickled)
    if current_platform.is_cpu():
        _serve_on_the_cpu(type(current_platform))


def _serve_on_the_cpu(platform: Any) -> None:
    """Has vLLM's CPU platform, which knows its own backend alone, answer with this one where it is asked for."""
    usual = platform.get_attn_backend_cls.__func__
    if usual.__module__ == __name__:
        return

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Optional[int] = None) -> str:
        if selected_backend is None or selected_backend.name != "ATTN":
            return usual(cls, selected_backend, attn_selector_config, num_heads)
        reasons = AttnBackend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"the attention backend ATTN does not serve this model on the CPU: {'; '.join(reasons)} (of {attn_selector_config})")
        if not any(name in os.environ for name in IDLE_THREADS):
            _LOG.warning("torch's idle OpenMP threads spin on the cores that attention needs, which takes it two to three times as long; set %s=1000 in the environment", IDLE_THREADS[0])
        return f"{__name__}.AttnBackend"

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _pickled(member: Any) -> Any:
    """How vLLM's names of backends are pickled: the others as enums are, by their values."""
    return (backend_name, ()) if member.name == "ATTN" else member.__reduce_ex__(2)


def backend_name() -> Any:
    """vLLM's name of this backend, for pickles: a process that vLLM spawns unpickles its configuration before it loads plugins."""
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum["ATTN"]


class AttnBackend(AttentionBackend):
    """What vLLM asks of a backend before it makes one."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[List[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[List[str]] = list(FORMATS)

    @staticmethod
    def get_name() -> str:
        return "ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return AttnImpl

    @staticmethod
    def get_builder_cls() -> type:
        return AttnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> List[int]:
        return list(BLOCK_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        # vLLM asks where the user has named none. A tile of the kernels is one page then.
        return PREFERRED_BLOCK

    @classmethod
    def get_supported_head_sizes(cls) -> List[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Optional[str]) -> bool:
        return kv_cache_dtype in FORMATS or kv_cache_dtype in AUTO

    @classmethod
    def supported_kv_cache_layouts(cls) -> Tuple[Any, ...]:
        # A block is one run of bytes: [head][tokens of K, V and their scales].
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Says how many bytes a token and head take, a share of its block's centres among them."""
        if spec.state_content_bytes is not None:
            return spec
        if not spec.kv_quant_mode:
            float_format(spec.dtype)
            return spec
        (format,) = [FORMATS[name] for name, dtype in ELEMENTS.items() if dtype == spec.dtype]
        return replace(spec, state_content_bytes=cell_bytes(format, spec.head_size))

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Query blocks of ragged batches are planned from the host's lengths.
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        # The CPU has none.
        return capability is None or capability.major >= 8


def run_bytes(format: str, head_size: int) -> int:
    """Bytes of K, V and their scales, of a token and head."""
    return _attn.page_bytes(format, 1, (head_size, head_size), 64) // 64


def cell_bytes(format: str, head_size: int) -> int:
    """Bytes of a token and head, with its share of the centres of a block of 64 tokens: the C of vLLM's cell tensor `[blocks, heads, tokens, C]`. The same for all block sizes,
    which vLLM chooses by it."""
    return run_bytes(format, head_size) + (centre_bytes(head_size) // FIRST_TILE if format in CENTRED else 0)


def centre_bytes(head_size: int) -> int:
    """Bytes of a head's two centres of K."""
    return 4 * head_size


@dataclass(frozen=True)
class Blocks:
    """How a layer's blocks of so many tokens lie in `kv_cache` `[blocks, KV heads, tokens, bytes]`."""

    format: str
    tokens: int
    # Bytes of a block that are in use, and whether the centres of K of its sequence are among them.
    used: int
    has_centres: bool

    @classmethod
    def of(cls, format: str, spec: Any) -> "Blocks":
        tokens, heads, head_size = spec.block_size, spec.num_kv_heads, spec.head_size
        # Other specifications are of layers whose first blocks vLLM frees.
        has_centres = format in CENTRED and tokens >= FIRST_TILE and isinstance(spec, FullAttentionSpec)
        centres = heads * centre_bytes(head_size) if has_centres else 0
        return cls(format, tokens, heads * tokens * run_bytes(format, head_size) + centres, has_centres)

    def pool(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The blocks as pages: uint8 `[blocks, bytes]`, of which `used` are in use."""
        if not kv_cache.is_contiguous():
            raise UnsupportedError(
                f"the cache has the strides {kv_cache.stride()} for the shape {tuple(kv_cache.shape)}; the attention backend ATTN reads blocks that "
                "lie side by side: use the layout LBHNC without page padding"
            )
        return kv_cache.view(torch.uint8).view(kv_cache.shape[0], -1)


def float_format(dtype: torch.dtype) -> str:
    """The format of a cache of the model's own elements."""
    if dtype not in FLOATS:
        raise UnsupportedError(
            f"the attention backend ATTN has no cache of {dtype}, the model's elements; allowed: models of 16 bits (--dtype bfloat16), or --kv-cache-dtype {' or '.join(FORMATS)}"
        )
    return FLOATS[dtype]


@dataclass
class AttnMetadata(AttentionMetadata):
    """A batch, for all layers."""

    num_actual_tokens: int
    q_lens: Tuple[int, ...]
    max_kv_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    # Of each token, int32: the first block of its sequence, and its number in it.
    first_blocks: torch.Tensor
    positions: torch.Tensor
    is_capture: bool
    builder: "AttnMetadataBuilder" = field(repr=False)

    @cached_property
    def host_lens(self) -> List[int]:
        """The sequences' lengths, where they lie in host memory."""
        return self.seq_lens.tolist()


class AttnMetadataBuilder(AttentionMetadataBuilder):
    """Makes a batch's metadata, and keeps the plans of all layers."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.max_model_len = vllm_config.model_config.max_model_len
        # vLLM has measured memory: the plans of the largest steps leave it to those of real ones.
        _largest_plans.end_measuring()
        # Graphs hold the workspaces of the plans that they captured.
        # vLLM captures the largest batch first, whose scratch memory serves the others.
        self.scratch = Scratch()
        self.captured: Dict[Tuple, Plan] = {}
        self.plans: "OrderedDict[Tuple, Plan]" = OrderedDict()
        weakref.finalize(self, _largest_plans.close_plans_of, self.captured, self.plans)
        scheduler = vllm_config.scheduler_config
        self.token_places = TokenPlaces(scheduler.max_num_batched_tokens + scheduler.max_num_seqs, device)
        self._blocks: Optional[Blocks] = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttnMetadata:
        return self._build(common_attn_metadata, is_capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> AttnMetadata:
        return self._build(common_attn_metadata, is_capture=True)

    def _build(self, batch: Any, is_capture: bool) -> AttnMetadata:
        if batch.causal is not True:
            raise UnsupportedError("the attention backend ATTN has causal masks alone under vLLM; choose another backend for this model")
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        q_lens = tuple(end - start for start, end in zip(starts, starts[1:]))
        if is_capture:
            # A graph serves every batch of its shape: padded requests, which may have no query token on the host, have as many as the others.
            q_lens = (max(q_lens, default=0),) * len(q_lens)
        longest = self.max_model_len if is_capture else planned_len(batch.max_seq_len, self.max_model_len)
        starts, requests = batch.query_start_loc[: batch.num_reqs + 1], slice(batch.num_reqs)
        first_blocks, positions = self.token_places.of(starts, batch.seq_lens[requests], batch.block_table_tensor[requests, 0], len(batch.slot_mapping))
        return AttnMetadata(
            num_actual_tokens=sum(q_lens),
            q_lens=q_lens,
            max_kv_len=min(longest, batch.block_table_tensor.shape[1] * self.kv_cache_spec.block_size),
            seq_lens=batch.seq_lens[: batch.num_reqs],
            block_table=batch.block_table_tensor[: batch.num_reqs],
            slot_mapping=batch.slot_mapping,
            first_blocks=first_blocks,
            positions=positions,
            is_capture=is_capture,
            builder=self,
        )

    def blocks(self, format: str) -> Blocks:
        """How blocks of this format lie."""
        if self._blocks is None or self._blocks.format != format:
            self._blocks = Blocks.of(format, self.kv_cache_spec)
        return self._blocks

    def plan(self, impl: "AttnImpl", blocks: Blocks, batch: AttnMetadata, device: torch.device) -> Plan:
        """The plan of a batch for layers with these heads and modifiers."""
        key = (impl.key, blocks, batch.q_lens, batch.max_kv_len)
        plan = self.captured.get(key) or self.plans.get(key)
        if plan is None:
            options = dict(impl.options, q_lens=batch.q_lens, max_kv_len=batch.max_kv_len, device=device, scratch=self.scratch)
            plan = Plan(blocks.format, page_size=blocks.tokens, centres=blocks.has_centres, **options)
        if batch.is_capture:
            self.captured[key] = plan
            self.plans.pop(key, None)
        elif key not in self.captured:
            self.plans[key] = plan
            self.plans.move_to_end(key)
            if len(self.plans) > _KEPT_PLANS:
                self.plans.popitem(last=False)[1].close()
        return plan


def planned_len(longest: int, most: int) -> int:
    """The length that a plan is made for: at most an eighth more than the batch's longest, so that growing sequences need few plans."""
    step = max(64, (1 << (max(longest, 1) - 1).bit_length()) // 16)
    return min(-(-longest // step) * step, most)


@dataclass(frozen=True)
class Limits:
    """The most that vLLM puts into a step."""

    sequences: int
    # Tokens of a sequence, and its query tokens while it decodes: one, and those of its draft.
    tokens: int
    decoded: int
    cache_config: Any

    @property
    def block(self) -> int:
        """Tokens of a block, which vLLM chooses when it has made all layers."""
        return self.cache_config.block_size or PREFERRED_BLOCK

    @classmethod
    def of_engine(cls) -> Optional["Limits"]:
        """Those of the engine that is being made; none outside of one."""
        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None:
            return None
        drafts = config.speculative_config
        return cls(
            sequences=config.scheduler_config.max_num_seqs,
            tokens=config.model_config.max_model_len,
            decoded=1 + (drafts.num_speculative_tokens if drafts else 0),
            cache_config=config.cache_config,
        )


class AttnImpl(AttentionImpl):
    """Attention of one layer."""

    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Optional[int] = None,
        alibi_slopes: Optional[List[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[torch.Tensor] = None,
    ) -> None:
        if not AttnBackend.supports_kv_cache_dtype(kv_cache_dtype):
            raise UnsupportedError(f"the attention backend ATTN has no cache of type {kv_cache_dtype!r}; allowed: --kv-cache-dtype {' or '.join(FORMATS)} or auto")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError("the attention backend ATTN has decoder layers alone; choose another backend for this model")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        # A layer that attends another's cache, which that one has appended to.
        self.is_appending = kv_sharing_target_layer_name is None
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.limits = Limits.of_engine()
        self.largest_plans = _largest_plans.of_new_layer()
        self.key_look = KeyLook(kv_cache_dtype)
        # Of the CPU, by how blocks lie.
        self.host_pages: Dict[Tuple, HostPages] = {}
        self.options = dict(
            heads=num_heads,
            kv_heads=self.num_kv_heads,
            dim=head_size,
            scale=self.scale,
            softcap=logits_soft_cap or None,
            # vLLM's window counts the token itself.
            window_left=None if sliding_window is None or sliding_window < 0 else sliding_window - 1,
            alibi_slopes=alibi_slopes,
        )
        slopes = None if alibi_slopes is None else tuple(float(slope) for slope in alibi_slopes)
        self.key: Tuple = tuple(x for name, x in self.options.items() if name != "alibi_slopes") + (slopes,)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Takes the sinks, which are weights: they have no values before."""
        if self.sinks is not None:
            sinks = tuple(self.sinks.float().tolist())
            self.options["sinks"] = sinks
            self.key += (sinks,)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Optional[torch.Tensor],
        value: Optional[torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: Optional[AttnMetadata],
        output: Optional[torch.Tensor] = None,
        output_scale: Optional[torch.Tensor] = None,
        output_block_scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Appends the step's tokens to their slots, and attends.

        query `[tokens, heads, head_size]`, key and value `[tokens, KV heads, head_size]`, kv_cache `[blocks, KV heads, block size, bytes]`;
        rows behind `num_actual_tokens` are padding, whose outputs are left as they are.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("the attention backend ATTN writes 16 and 32 bits; turn the fusion of output quantization off")
        if output is None:
            output = torch.zeros_like(query)
        if attn_metadata is None:
            # vLLM measures memory with a pass that has no batch; so have later passes, of ranks without requests among others.
            self._load(query)
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        if tokens == 0:
            return output
        q = query[:tokens].view(tokens, self.num_heads, self.head_size).contiguous()
        out = output[:tokens].view(tokens, self.num_heads, self.head_size)
        kv = None
        if self.is_appending and key is not None and value is not None:
            kv = tuple(x[:tokens].view(tokens, self.num_kv_heads, self.head_size) for x in (key, value))
        format = FORMATS.get(self.kv_cache_dtype) or float_format(kv_cache.dtype)
        blocks = attn_metadata.builder.blocks(format)
        if kv is not None and format not in FLOATS.values() and not blocks.has_centres and not attn_metadata.is_capture:
            self.key_look.look(layer, kv[0], attn_metadata.q_lens, attn_metadata.max_kv_len)
        slots = attn_metadata.slot_mapping[:tokens]
        places = dict(first_pages=attn_metadata.first_blocks[:tokens], positions=attn_metadata.positions[:tokens]) if blocks.has_centres else {}
        pool = blocks.pool(kv_cache)
        if query.device.type == "cpu":
            pages = self._host_pages(blocks, pool.shape[1])
            if kv is not None:
                pages.append_slots(*kv, pool, slots, **places)
            modifiers = {name: self.options.get(name) for name in ("scale", "softcap", "window_left", "alibi_slopes", "sinks")}
            pages.attend(q, pool, attn_metadata.block_table.contiguous(), attn_metadata.host_lens, q_lens=attn_metadata.q_lens, out=out, **modifiers)
            return output
        plan, pool = attn_metadata.builder.plan(self, blocks, attn_metadata, query.device), pool[:, : blocks.used]
        if kv is not None:
            one_each = max(attn_metadata.q_lens) <= 1
            plan.append_slots_now(*kv, pool, slots, centres=Centres(**places, one_each=one_each) if places else None)
        plan.attend_into(q, out, pool, attn_metadata.block_table, attn_metadata.seq_lens)
        return output

    def _load(self, query: torch.Tensor) -> None:
        """Loads the kernels of all steps, makes the plans of the largest ones, and runs each over no tokens: prompts of as many tokens as `query` has, and decoding, of one sequence
        and of as many as vLLM runs."""
        limits = self.limits
        if limits is None or self.largest_plans.is_over or query.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        key = (self.key, self.kv_cache_dtype, query.dtype, query.device)
        if key in self.largest_plans.made:
            return
        format = FORMATS.get(self.kv_cache_dtype) or float_format(query.dtype)
        has_centres = format in CENTRED and limits.block >= FIRST_TILE
        prompt = max(min(len(query), limits.tokens), 1)
        decoding = (limits.decoded,) * limits.sequences
        steps = {(prompt,), decoding[:1], decoding, (prompt,) + decoding[1:]}
        made, scratch = self.largest_plans.made.setdefault(key, []), Scratch()
        for q_lens in sorted(steps, key=sum, reverse=True):
            for longest in sorted({planned_len(max(q_lens), limits.tokens), limits.tokens}, reverse=True):
                plan = Plan(
                    format, page_size=limits.block, q_lens=q_lens, max_kv_len=longest, device=query.device, scratch=scratch, centres=has_centres, **self.options
                )
                if not made:
                    plan.load_smaller()
                pool = plan.new_pool(1)
                nothing = torch.zeros(len(q_lens), dtype=torch.int32, device=query.device)
                rows = query.new_zeros(sum(q_lens), self.num_heads, self.head_size)
                kv = query.new_zeros(sum(q_lens), self.num_kv_heads, self.head_size)
                slots = torch.full((len(kv),), -1, dtype=torch.int64, device=query.device)
                plan.append_slots_now(kv, kv, pool, slots, centres=Centres(slots.int(), slots.int()) if has_centres else None)
                table = nothing.new_zeros(len(q_lens), -(-longest // limits.block))
                plan.attend_into(rows, rows.clone(), pool, table, nothing)
                made.append(plan)
        # Torch loads its kernels at their first use, too.
        unevenness(query.new_zeros(LOOKED_AT, self.num_kv_heads, self.head_size))

    def _host_pages(self, blocks: Blocks, stride: int) -> HostPages:
        key = (blocks, stride)
        if key not in self.host_pages:
            lie = dict(page_size=blocks.tokens, page_stride=stride, centres=blocks.has_centres)
            self.host_pages[key] = HostPages(blocks.format, kv_heads=self.num_kv_heads, dim=self.head_size, **lie)
        return self.host_pages[key]
