"""A random Llama whose greedy tokens depend on attention, as a checkpoint: `python model.py FOLDER DIM [KV_HEADS [WINDOW]]`, with a window a Mistral."""

import json
import os
import sys

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, INNER, WORDS = 4, 512, 8, 1024, 2048


def config(dim, kv_heads, window):
    family = "Llama" if window is None else "Mistral"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "sliding_window": window,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": WORDS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }


def weights(dim, kv_heads):
    generator = torch.Generator().manual_seed(0)

    def matrix(rows, columns, gain):
        return (torch.randn(rows, columns, generator=generator) * gain / columns**0.5).bfloat16()

    made = {
        "model.embed_tokens.weight": torch.randn(WORDS, HIDDEN, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
        "lm_head.weight": matrix(WORDS, HIDDEN, 3.0),
    }
    # Queries and outputs of a size that makes attention matter.
    shapes = {
        "self_attn.q_proj": (HEADS * dim, HIDDEN, 1.5),
        "self_attn.k_proj": (kv_heads * dim, HIDDEN, 1.5),
        "self_attn.v_proj": (kv_heads * dim, HIDDEN, 1.0),
        "self_attn.o_proj": (HIDDEN, HEADS * dim, 3.0),
        "mlp.gate_proj": (INNER, HIDDEN, 1.0),
        "mlp.up_proj": (INNER, HIDDEN, 1.0),
        "mlp.down_proj": (HIDDEN, INNER, 1.0),
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name, shape in shapes.items():
            made[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
    return made


def make(folder, dim, kv_heads=2, window=None):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config(dim, kv_heads, window), file)
    save_file(weights(dim, kv_heads), os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    make(sys.argv[1], *map(int, sys.argv[2:]))
