"""Small models of transformers with random weights, for the tests of `attn.transformers`; `REASON` says why there are none."""

import copy

import pytest
from conftest import require

try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    REASON = None
except ImportError as error:
    torch, PAST, REASON = None, None, str(error)
else:
    # transformers 5.24 has renamed the argument.
    PAST = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"


@pytest.fixture(autouse=True)
def has_torch():
    if REASON is not None:
        require("torch", REASON)


@pytest.fixture(autouse=True)
def without_gradients(has_torch):
    with torch.no_grad():
        yield


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and (torch is None or not torch.cuda.is_available()):
        require("cuda", "torch sees no CUDA device")
    return request.param


COMMON = dict(
    vocab_size=300,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)


def config_of(kind, **changes):
    if kind == "llama":
        return transformers.LlamaConfig(**{**COMMON, **changes})
    if kind == "qwen3":
        return transformers.Qwen3Config(**{**COMMON, "head_dim": 128, **changes})
    if kind == "mistral":
        # A window in every layer.
        return transformers.MistralConfig(**{**COMMON, "sliding_window": 24, **changes})
    if kind == "gemma2":
        return transformers.Gemma2Config(
            **{**COMMON, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 24, "attn_logit_softcapping": 2.0, **changes}
        )
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        return transformers.Gemma3TextConfig(**{**COMMON, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 24, "layer_types": layers, **changes})
    if kind == "gemma4":
        # Wider heads in full layers; the last two layers attend over K and V of the first two.
        layers = ["sliding_attention", "full_attention"] * 2
        shapes = dict(num_hidden_layers=4, head_dim=64, global_head_dim=128, layer_types=layers, sliding_window=24, num_kv_shared_layers=2)
        return transformers.Gemma4TextConfig(**{**COMMON, **shapes, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 300, **changes})
    if kind == "llama4":
        # Chunks in the layers with rotary positions; all experts take part.
        shapes = dict(head_dim=64, intermediate_size_mlp=256, num_local_experts=2, num_experts_per_tok=2, layer_types=["chunked_attention", "full_attention"])
        return transformers.Llama4TextConfig(**{**COMMON, **shapes, "no_rope_layers": [1, 0], "attention_chunk_size": 24, **changes})
    if kind == "falcon-h1":
        # States of linear attention beside K and V in each layer.
        mamba = dict(mamba_d_ssm=128, mamba_n_heads=2, mamba_d_head=64, mamba_d_state=16, mamba_chunk_size=32)
        return transformers.FalconH1Config(**{**COMMON, **mamba, "head_dim": 64, **changes})
    if kind == "deepseek":
        # 128 dims of a latent and 64 of a rotary key; K of 96 + 64 dims and V of 128 where a version of transformers caches these.
        ranks = dict(q_lora_rank=64, kv_lora_rank=128, qk_nope_head_dim=96, qk_rope_head_dim=64, v_head_dim=128, num_key_value_heads=4)
        return transformers.DeepseekV3Config(**{**COMMON, **ranks, "first_k_dense_replace": 2, **changes})
    layers = ["sliding_attention", "full_attention"]
    # All experts take part: a router that chooses turns a rounding into another expert.
    return transformers.GptOssConfig(
        **{**COMMON, "head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 24, "layer_types": layers, **changes}
    )


KINDS = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "llama4", "deepseek", "gpt-oss"]


def pair(kind, device="cpu", **changes):
    """The same weights under transformers' own attention and under ours."""
    torch.manual_seed(7)
    config = config_of(kind, **changes)
    # A model writes its attention into its configuration.
    own = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in own.named_parameters():
            # Scores that differ, and sinks that take their share.
            if "sinks" in name:
                weight.uniform_(-1, 3)
            elif kind == "gemma4" and "q_norm" in name:
                # Its scores are scaled by this weight alone.
                weight.mul_(0.125)
            elif "q_proj" in name or "k_proj" in name or "_b_proj" in name:
                weight.mul_(4)
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="attn").eval()
    ours.load_state_dict(own.state_dict())
    return config, own.to(device), ours.to(device)


def prompt(*shape, device="cpu", seed=3):
    return torch.randint(1, 300, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def padded(prompts):
    """Prompts in one batch, padded on the left, and their mask."""
    longest = max(len(p) for p in prompts)
    ids = torch.stack([torch.cat([torch.zeros(longest - len(p), dtype=p.dtype, device=p.device), p]) for p in prompts])
    mask = torch.stack([torch.cat([torch.zeros(longest - len(p)), torch.ones(len(p))]) for p in prompts]).long()
    return ids, mask.to(ids.device)


def given(cache):
    """A model's argument."""
    return {PAST: cache}


def generate(model, cache, ids, mask=None, **options):
    options = dict(dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None), **options)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **given(cache), **options)
