"""Every causal and image-text model type of transformers on a quantized cache, against its own eager attention.

    python sweep_transformers.py [--fast] [--only TYPE,TYPE] [--out FILE]

Each type's default configuration is shrunk to 4 layers of 4 heads with random weights, and a batch of two rows, one padded on the left, runs once in eager
attention without a cache, and in pieces of 40, 1, 9 and 40 tokens over `QuantizedCache`. A type passes if its logits are eager's, or if attn refuses it with
an `AttnError`; other logits, and any other error that eager does not raise, fail, and the exit status is 1. Types whose configuration cannot be shrunk, or
whose model does not run on text alone, are listed by name with the reason. `--fast` takes types of each kind, for `.ci/run`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import inspect
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import attn
import torch
import transformers
from attn.transformers import QuantizedCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

# Transformers 5.24 has renamed it.
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
PIECES = (40, 1, 9, 40)
TOKENS = sum(PIECES)
# Of the second row.
PADDING = 13
VOCABULARY = 300
# Errors relative to the logits' deviation, root mean squares.
# Keys of random weights have nothing in common: less the first one, their centre, they are larger by a factor of √2.
BOUNDS = {"f16": 1e-3, "int8": 3e-2}
# PhiMoE's router takes two experts however many there are, so int8's rounding sends some tokens to others.
# MiniCPM3's scores are so large that rounding latents to 16 bits moves its logits by 0.13 %.
BOUNDS_OF = {"phimoe": {"f16": 1e-3, "int8": 5e-2}, "minicpm3": {"f16": 2e-3, "int8": 1e-1}}
# Parameters of a model that counts as small.
MOST_PARAMETERS = 150e6

LAYERS = 4
# Dims of a head: the first, or the second where a model cannot be built or run with the first.
HEAD_DIMS = (64, 128)
HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim", "embedding_size", "emb_dim", "dim_model")
DIMS = ("head_dim", "swa_head_dim", "kv_channels", "d_kv", "dim_head", "global_head_dim", "query_pre_attn_scalar")
# What numbers become, whatever they were.
EXACT: Dict[str, float] = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads"), 4),
    # All experts take part: a router that chooses turns a rounding into another expert.
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "num_experts_per_token", "top_k_experts"), 4),
    # Scores of a size at which 16 bits are enough.
    **dict(attention_multiplier=0.125, qk_scale_factor=1.0),
    **dict(n_input_layers=1, n_recurrent_layers=2, n_output_layers=1),
}
# What larger numbers become.
SMALL: Dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "depth", "num_encoder_layers", "resampler_depth"), 2),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "moe_intermediate_size", "ffn_hidden_size", "mlp_dim", "d_ff"), 256),
    **dict.fromkeys(("dff", "dim_ff", "n_inner", "shared_expert_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size"), 256),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "projector_hidden_size", "projection_dim"), 256),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions", "model_max_length"), 512),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), 24),
    **dict.fromkeys(("rotary_dim",), 32),
    **dict.fromkeys(("num_kv_shared_layers",), LAYERS // 2),
    **dict.fromkeys(("num_embeddings", "codebook_size", "ngram_vocab_size_base", "encoder_hash_byte_group_vocab"), 512),
}
# What defaults leave open though the model needs it, or what belongs to other numbers of layers and dims.
OPEN: Dict[str, Dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "dots1": {"n_routed_experts": 4},
    # Their states by default take most of the sweep's time.
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_chunk_size": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "nemotron_h": {"mamba_num_heads": 2, "mamba_head_dim": 64, "ssm_state_size": 16, "chunk_size": 32, "n_groups": 1},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "step3p7": {"sliding_window": 24},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2), "attention_hidden_size": 512, "attention_head_dim": 128},
    "zamba2": {"attention_hidden_size": 512, "attention_head_dim": 128, "mamba_headdim": 64, "hybrid_layer_ids": [3]},
}
# Kinds of attention, of masks and of caches: plain, windows, caps, sinks, chunks, experts, hybrids with linear attention, biases of scores, MLA, attention by
# code of the model's own, several attentions of one layer, loops, layers without attention, decoders of encoder-decoder models, models of several parts.
FAST = (
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text gemma3n_text gemma4_text gpt_oss cohere2 olmo3 phi3 glm4 granite smollm3 llama4_text qwen3_moe "
    "qwen3_next nemotron_h falcon_h1 mamba deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 zamba2 "
    "bloom mpt falcon gpt2 gptj gpt_neo gpt_neox gpt_neox_japanese opt bert bart bigbird_pegasus diffllama dory "
    "gemma3 qwen2_5_vl llava"
).split()


@dataclass
class Verdict:
    kind: str
    """`right`, `refused`, `not built`, or what fails: `WRONG`, `RAW`."""
    text: str
    seconds: float = 0.0


def shrunk(values: Dict[str, Any], head_dim: int) -> Dict[str, Any]:
    """A configuration's values, of each part of it, made small."""
    exact = {**EXACT, **dict.fromkeys(DIMS, head_dim), **dict.fromkeys(HIDDEN, 4 * head_dim)}
    if values.get("kv_lora_rank"):
        # Latents: the ranks and the parts of a head stay as they are, and each query head has K and V of its own.
        exact = {**{name: x for name, x in exact.items() if name not in DIMS}, "num_key_value_heads": 4}
    layers = next((values[n] for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers") if isinstance(values.get(n), int)), None)
    kept = _kept_layers(values, layers) if layers else None
    if "mlp" in (values.get("layer_types") or ()):
        # Dory counts attention and MLP as a layer each where a file lists both.
        values = {**values, "layer_types": None}
    small = {}
    for name, x in values.items():
        if name == "per_layer_config" and isinstance(x, dict):
            x = {kept.index(int(layer)): shrunk(of_layer, head_dim) for layer, of_layer in x.items() if int(layer) in kept}
        elif isinstance(x, dict) and name.endswith(("config", "rope_parameters", "rope_scaling", "_attention")):
            x = shrunk(x, head_dim)
        elif name == "mrope_section" and isinstance(x, list):
            # Pairs of a head, as many as there are.
            x = [head_dim // 2 * n // sum(x) for n in x]
            x[0] += head_dim // 2 - sum(x)
        elif name in ("head_dim", "num_key_value_heads") and x is None:
            x = head_dim if name == "head_dim" else 2
        elif name in exact and isinstance(x, (int, float)) and not isinstance(x, bool):
            x = exact[name]
        elif isinstance(x, list) and kept is not None and len(x) == layers and layers > LAYERS:
            x = [x[i] for i in kept]
        elif name in SMALL and isinstance(x, int) and not isinstance(x, bool):
            x = min(x, SMALL[name])
        elif name.endswith(("token_id", "token_index")) and isinstance(x, int) and x >= VOCABULARY:
            x = VOCABULARY - 1
        elif name.endswith("token_id") and isinstance(x, list):
            x = [min(i, VOCABULARY - 1) for i in x]
        small[name] = x
    return small


def _kept_layers(values: Dict[str, Any], layers: int) -> List[int]:
    """Which layers are kept: one of each kind that there is, then the first; where layers share K and V with others, as many of each kind that do."""
    kinds = values.get("layer_types") or values.get("layers_block_type")
    if not isinstance(kinds, list) or len(kinds) != layers:
        return list(range(min(LAYERS, layers)))
    shared = values.get("num_kv_shared_layers") or 0
    if shared:
        own = layers - shared
        return [start + kinds[start:].index(kind) for start in (0, own) for kind in dict.fromkeys(kinds)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:LAYERS]
    return sorted(first + [i for i in range(layers) if i not in first][: LAYERS - len(first)])


def small_config(kind: str, head_dim: int) -> Any:
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    values = shrunk(default.to_dict(), head_dim)
    for part in (values, *(x for x in values.values() if isinstance(x, dict))):
        part.update({name: x for name, x in OPEN.get(kind, {}).items() if name in part})
    for name in ("transformers_version", "_attn_implementation", "attn_implementation"):
        values.pop(name, None)
    config = config_class.from_dict(values)
    if hasattr(config, "is_decoder") and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config.is_decoder = True
    return config


def small_model(kind: str, config: Any) -> Any:
    made = transformers.AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        count = sum(p.numel() for p in made.from_config(copy.deepcopy(config), attn_implementation="eager").parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"the shrunk model has {count / 1e6:.0f} million parameters")
    torch.manual_seed(7)
    model = made.from_config(copy.deepcopy(config), attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Scores that differ.
            if weight.dim() == 2 and any(part in name for part in ("q_proj", "k_proj", "query", "key", "qkv", "c_attn")):
                weight.mul_(2)
        for module in model.modules():
            # Scores of a size at which 16 bits are enough, where only weights scale them.
            if getattr(module, "scaling", None) == 1.0 and hasattr(getattr(module, "q_norm", None), "weight"):
                module.q_norm.weight.mul_(0.125)
    return model


def batch() -> Tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY - 10, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def logits_of(model: Any, cache: Any = None, pieces: Tuple[int, ...] = (TOKENS,)) -> torch.Tensor:
    ids, mask = batch()
    parameters = inspect.signature(model.forward).parameters
    takes_positions = "position_ids" in parameters and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    parts, start = [], 0
    for n in pieces:
        part = slice(start, start + n)
        options: Dict[str, Any] = dict(attention_mask=mask[:, : start + n])
        options.update({"position_ids": positions[:, part]} if takes_positions else {})
        options.update({CACHE: cache, "use_cache": True} if cache is not None else {"use_cache": False})
        parts.append(model(ids[:, part], **options).logits)
        start += n
    return torch.cat(parts, 1)[mask.bool()]


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference, relative to the logits' deviation; infinite for what is no number."""
    error = ((found - wanted).square().mean().sqrt() / wanted.std()).item()
    return error if error == error else float("inf")


def judge(kind: str) -> Verdict:
    """What becomes of one type."""
    refusal = None
    try:
        QuantizedCache(CONFIG_MAPPING[kind]())
    except attn.AttnError as error:
        refusal = f"default configuration: {_told(error)}"
    except Exception as error:
        if not _config_fails(kind):
            return Verdict("RAW", f"QuantizedCache(default configuration): {_told(error)}")
    reasons = []
    for head_dim in HEAD_DIMS:
        try:
            config = small_config(kind, head_dim)
        except Exception as error:
            reasons.append(f"configuration: {_told(error)}")
            continue
        try:
            QuantizedCache(config)
        except attn.AttnError as error:
            return Verdict("refused", _told(error))
        except Exception as error:
            return Verdict("RAW", f"QuantizedCache: {_told(error)}")
        try:
            model = small_model(kind, config)
            wanted = logits_of(model)
            if not wanted.isfinite().all():
                raise ValueError("eager logits are not finite")
        except Exception as error:
            reasons.append(f"eager: {_told(error)}")
            continue
        return compared(config, model, wanted, BOUNDS_OF.get(kind, BOUNDS))
    return Verdict("not built", reasons[0]) if refusal is None else Verdict("refused", refusal)


def compared(config: Any, model: Any, wanted: torch.Tensor, bounds: Dict[str, float]) -> Verdict:
    errors = {}
    try:
        model.set_attn_implementation("attn")
        for format in BOUNDS:
            errors[format] = error_of(logits_of(model, QuantizedCache(config, format), PIECES), wanted)
    except attn.AttnError as error:
        return Verdict("refused", _told(error))
    except Exception as error:
        own = own_cache_error(config, model, wanted)
        if own is None:
            return Verdict("not built", f"it does not run with transformers' own cache either: {_told(error)}")
        return Verdict("RAW", f"pass: {_told(error)}")
    text = ", ".join(f"{format} {100 * error:.3f} %" for format, error in errors.items())
    if all(errors[format] <= bound for format, bound in bounds.items()):
        return Verdict("right", text)
    # A model that attends in pieces otherwise than at once does so with any cache.
    own = own_cache_error(config, model, wanted)
    if own is None or own > BOUNDS["f16"]:
        return Verdict("not comparable", f"{text}; transformers' own cache in eager: {'raises' if own is None else f'{100 * own:.3f} %'}")
    return Verdict("WRONG", f"{text}; transformers' own cache {100 * own:.3f} %")


def own_cache_error(config: Any, model: Any, wanted: torch.Tensor) -> Optional[float]:
    """The error of transformers' own cache in pieces; None where it raises."""
    try:
        model.set_attn_implementation("eager")
        return error_of(logits_of(model, transformers.DynamicCache(config=config), PIECES), wanted)
    except Exception:
        return None


def _config_fails(kind: str) -> bool:
    try:
        CONFIG_MAPPING[kind]()
        return False
    except Exception:
        return True


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:220]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fast", action="store_true", help="types of each kind alone")
    parser.add_argument("--only", help="these types, by commas")
    parser.add_argument("--part", default="1/1", help="every n-th type from the i-th on, as i/n")
    parser.add_argument("--out", help="a file for the table, too")
    arguments = parser.parse_args()
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    kinds = arguments.only.split(",") if arguments.only else [k for k in FAST if k in every] if arguments.fast else every
    first, step = map(int, arguments.part.split("/"))
    kinds = kinds[first - 1 :: step]
    unknown = [kind for kind in kinds if kind not in every]
    if unknown:
        parser.error(f"transformers {transformers.__version__} has no causal or image-text type {', '.join(unknown)}")
    lines, counts, begun = [], {}, time.perf_counter()

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say(f"transformers {transformers.__version__}, torch {torch.__version__}: {len(kinds)} types of {len(every)}, errors by format relative to eager's logits")
    for kind in kinds:
        start = time.perf_counter()
        with quiet():
            verdict = judge(kind)
        gc.collect()
        counts[verdict.kind] = counts.get(verdict.kind, 0) + 1
        say(f"{kind:32} {verdict.kind:14} {time.perf_counter() - start:5.1f} s  {verdict.text}")
    say(f"{', '.join(f'{n} {kind}' for kind, n in sorted(counts.items()))}; {time.perf_counter() - begun:.0f} s")
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write("\n".join(lines) + "\n")
    return 1 if any(kind.isupper() for kind in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
