"""Models with latent attention (MLA) on a quantized cache: from transformers 5.24 on, they give their cache latents."""

import attn
import pytest
from tiny_models import REASON, config_of, given, has_torch, pair, prompt, without_gradients

if REASON is None:
    import torch
    import transformers
    from attn.transformers import QuantizedCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    HAS_LATENTS = hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv")


@pytest.fixture(autouse=True)
def has_latents(has_torch):
    if not HAS_LATENTS:
        pytest.skip(f"transformers {transformers.__version__} gives its cache K and V of all heads, which other tests attend over")


def test_a_token_is_one_latent_and_one_rotary_key():
    """Kills caches of expanded heads."""
    config, _, ours = pair("deepseek")
    cache = QuantizedCache(config, "f16")
    ours(prompt(2, 30), **given(cache))
    stored = cache.layers[0].cache
    assert (stored.heads, stored.dim, stored.v_dim) == (1, 192, 128)
    keys, values = stored.export(0)
    assert (keys[..., :128] == values).all() and keys[..., 128:].any()


def test_latents_of_288_dims_are_stored_with_zeros():
    config, own, ours = pair("deepseek", kv_lora_rank=256, qk_rope_head_dim=32)
    ids = prompt(1, 50)
    cache = QuantizedCache(config, "f16")
    found = torch.cat([ours(piece, **given(cache)).logits for piece in ids.split(33, 1)], 1)
    assert (found - own(ids).logits).abs().max() < 5e-3 * own(ids).logits.std() and cache.layers[0].cache.dim == 320


def test_a_model_that_expands_latents_otherwise_is_refused(monkeypatch):
    """Kills trust in a method's name."""
    config, _, ours = pair("deepseek")
    attention = type(ours.model.layers[0].self_attn)
    QuantizedCache(config)
    original = attention.expand_kv.attn_wraps

    def doubled(self, latents, rotary):
        key, value = original(self, latents, rotary)
        return key, 2 * value

    monkeypatch.setattr(attention, "expand_kv", doubled)
    cache = QuantizedCache(config)
    with pytest.raises(attn.UnsupportedError, match="otherwise than by its kv_b_proj"):
        ours(prompt(1, 10), **given(cache))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("change", ["bias", "a wrapper"])
def test_an_expansion_that_is_no_plain_linear_layer_is_refused(change):
    config, _, ours = pair("deepseek")
    attention = ours.model.layers[1].self_attn
    if change == "bias":
        attention.kv_b_proj.bias = torch.nn.Parameter(torch.ones(attention.kv_b_proj.out_features))
    else:
        attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)
    cache = QuantizedCache(config)
    with pytest.raises(attn.UnsupportedError, match="torch.nn.Linear of 128 features without bias"):
        ours(prompt(1, 10), **given(cache))
    assert cache.get_seq_length() == 0


def test_latents_given_to_the_attention_itself_are_refused(monkeypatch):
    config, _, ours = pair("deepseek")
    cache = QuantizedCache(config)
    monkeypatch.setattr(type(ours.model.layers[0].self_attn), "expand_kv", lambda self, latents, rotary: (latents, rotary))
    with pytest.raises(attn.UnsupportedError, match="other K or V|otherwise"):
        ours(prompt(1, 10), **given(cache))


def test_wider_latents_than_attn_has_are_refused():
    config = config_of("deepseek")
    config.kv_lora_rank = 600
    with pytest.raises(attn.UnsupportedError, match="664 dims"):
        QuantizedCache(config)


@pytest.mark.parametrize("format, row, both", [("int8", 192 + 2 + 2, 192 + 2 + 128 + 2), ("bf16", 2 * 192, 2 * (192 + 128))])
def test_latents_are_stored_once(format, row, both):
    """Kills values that are not those of the keys."""
    config, own, ours = pair("deepseek")
    ids = prompt(2, 90)
    caches = [QuantizedCache(config, name) for name in (format, f"{format}-latents")]
    found = [torch.cat([ours(piece, **given(cache)).logits for piece in ids.split(64, 1)], 1) for cache in caches]
    errors = [(x - own(ids).logits).norm() / own(ids).logits.norm() for x in found]
    assert errors[1] < 1.5 * errors[0] + 1e-3, errors
    assert [cache.layers[0].cache.stats().page_bytes for cache in caches] == [64 * both, 64 * row]


def test_four_bits_of_latents_err_more_than_they_save():
    """Latents of 512 + 64 dims in two copies of 4 bits take 552 bytes, stored once in 8 bits 580, once in 4 would take 300. Holds why there is no such format: twelve times the
    error, for a half of the bytes. Kills latents that err as 4 bits do."""
    config, own, ours = pair("deepseek", kv_lora_rank=512, qk_rope_head_dim=64)
    ids = prompt(2, 300)
    wanted = own(ids).logits
    errors, rows = [], []
    for format in ("bf16-latents", "int8-latents", "int4-g1"):
        cache = QuantizedCache(config, format)
        logits = torch.cat([ours(piece, **given(cache)).logits for piece in ids.split(100, 1)], 1)
        errors.append(float((logits - wanted).norm() / wanted.norm()))
        rows.append(cache.layers[0].cache.stats().page_bytes / 64)
    assert rows == [1152, 580, 552]
    assert errors[0] < 0.004 and errors[1] < 0.02 and errors[2] > 8 * errors[1], errors


def test_large_rotary_keys_take_no_codes_from_latents():
    """With one scale for a token, as K has in int8, rotary keys 64 times as large leave the rest two of their eight bits. Kills that scale in latents, and queries with one step."""
    config, own, ours = pair("deepseek")
    for model in (own, ours):
        for layer in model.model.layers:
            projection = layer.self_attn.kv_a_proj_with_mqa
            projection.weight.data[config.kv_lora_rank :] *= 64
            queries = getattr(layer.self_attn, "q_b_proj", None) or layer.self_attn.q_proj
            heads = queries.weight.data.unflatten(0, (config.num_attention_heads, -1))
            heads[:, config.qk_nope_head_dim :] /= 64
    ids = prompt(1, 90)
    wanted = own(ids).logits
    errors = [(ours(ids, **given(QuantizedCache(config, format))).logits - wanted).norm() / wanted.norm() for format in ("int8-latents", "int8")]
    assert errors[0] < 0.25 * errors[1], errors


def test_models_without_latents_do_not_store_them():
    with pytest.raises(attn.UnsupportedError, match="int8-latents is for models with latent attention"):
        QuantizedCache(config_of("llama"), "int8-latents")
