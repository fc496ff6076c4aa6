"""Models whose last layers attend over the K and V of earlier ones (Gemma 3n, Gemma 4), on a quantized cache."""

import attn
import pytest
from tiny_models import REASON, given, has_torch, pair, padded, prompt, without_gradients

if REASON is None:
    import torch
    import transformers
    from attn.transformers import QuantizedCache, QuantizedLayer
    from attn.transformers._mask import PaddedRows


def logits(model, cache, ids, pieces, mask=None):
    parts, start = [], 0
    for n in pieces:
        of_mask = None if mask is None else mask[:, : start + n]
        parts.append(model(ids[:, start : start + n], attention_mask=of_mask, **given(cache)).logits)
        start += n
    return torch.cat(parts, 1)


def test_a_layer_that_shares_stores_nothing():
    config, _, ours = pair("gemma4")
    cache = QuantizedCache(config)
    ours(prompt(1, 40), **given(cache))
    quantized = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
    assert len(quantized) == 2 and all(layer.lens == [40] for layer in quantized)
    assert cache.get_seq_length() == 40 and cache.nbytes == sum(layer.stats().pool_bytes for layer in quantized)


@pytest.mark.parametrize("format", ["f16", "int8", "int4"])
def test_prompts_of_several_pieces_are_what_short_ones_are(format):
    """A prompt of 700 tokens is appended in pieces whose windows and residuals are gone when the layers that share come to it. Kills queries that see the
    tokens as they are stored at the prompt's end, and windows whose pages were dropped."""
    config, own, ours = pair("gemma4", sliding_window=100)
    ids, mask = padded([prompt(1, 700)[0], prompt(1, 333, seed=5)[0]])
    whole = logits(ours, QuantizedCache(config, format), ids, [700], mask)
    pieces = logits(ours, QuantizedCache(config, format), ids, [250, 200, 250], mask)
    wanted = own(ids, attention_mask=mask).logits
    shown, spread = mask.bool(), wanted[mask.bool()].std()
    # Torch's products differ in the last bits between the two.
    assert (whole - pieces)[shown].abs().max() < 2e-3 * spread
    assert (whole - wanted)[shown].square().mean().sqrt() < {"f16": 1e-3, "int8": 0.05, "int4": 0.5}[format] * spread


@pytest.mark.parametrize("format", ["int8", "int8/int4", "int4"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("first, tokens", [(0, 600), (300, 513), (40, 200)])
def test_the_bits_are_those_of_the_layer_that_stores(format, window, first, tokens):
    """And nothing is left of what was kept for it."""
    generator = torch.Generator().manual_seed(11)
    k, v = (torch.randn(2, 2, first + tokens, 64, generator=generator) for _ in range(2))
    q = torch.randn(2, 4, first + tokens, 64, generator=generator)
    options = dict(scale=None, window_left=None if window is None else window - 1)
    outs, layers = [], []
    for shared in (False, True):
        layer = QuantizedLayer(format, window=window, is_shared=shared)
        layer.begin(k, v)
        for part in (slice(0, first), slice(first, first + tokens)):
            if part.stop > part.start:
                x = [x[:, :, part] for x in (q, k, v)]
                layer.end_pass()
                out = layer.attend(*x, PaddedRows(None, 2, part.stop - part.start), options)
        outs.append(out)
        layers.append(layer)
    assert torch.equal(*outs)
    for asked in (tokens, tokens // 2, 1):
        rows = PaddedRows(None, 2, asked)
        again = layers[1].attend_again(q[:, :, -asked:], k[:, :, first:], v[:, :, first:], rows, options)
        assert torch.equal(again, outs[0][:, -asked:]), asked
    for layer in layers:
        layer.end_pass()
    used = [layer.cache.stats().pages - layer.cache.stats().free_pages for layer in layers]
    assert used[0] == used[1] and layers[0].lens == layers[1].lens


def test_a_layer_attends_once_a_pass_over_what_it_shares(monkeypatch):
    config, _, ours = pair("gemma4")
    interface = transformers.AttentionInterface()["attn"]

    def twice(module, *arguments, **options):
        if module.layer_idx == 2:
            interface(module, *arguments, **options)
        return interface(module, *arguments, **options)

    transformers.AttentionInterface.register("attn_twice", twice)
    transformers.AttentionMaskInterface.register("attn_twice", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["attn"])
    cache = QuantizedCache(config)
    ours(prompt(1, 20), **given(cache))
    ours.set_attn_implementation("attn_twice")
    with pytest.raises(attn.UnsupportedError, match="attends again"):
        ours(prompt(1, 20), **given(cache))
    assert cache.get_seq_length() == 20


def test_a_model_that_skips_layers_that_share_is_refused_at_its_next_pass():
    """Its last pass might have failed in them."""
    config, _, ours = pair("gemma4")
    cache, ids = QuantizedCache(config), prompt(1, 20)
    every = ours.model.layers
    ours.model.layers = every[:3]
    ours(ids, **given(cache))
    with pytest.raises(attn.UnsupportedError, match="the pass before ended at layer 1"):
        ours(ids, **given(cache))
    ours.model.layers = every
    assert torch.equal(ours(ids, **given(cache)).logits, ours(ids, **given(QuantizedCache(config))).logits)


def test_of_a_mask_only_the_last_queries_are_taken_out():
    config, _, ours = pair("gemma4")
    masks = []
    hook = ours.model.layers[0].self_attn.register_forward_pre_hook(lambda module, args, options: masks.append(options["attention_mask"]), with_kwargs=True)
    ids, mask = padded([prompt(1, 20)[0], prompt(1, 12)[0]])
    ours(ids, attention_mask=mask, **given(QuantizedCache(config)))
    hook.remove()
    last = masks[0][:, :, -3:, :]
    assert last.dense().shape[2:] == (3, 20) and torch.equal(last.dense(), masks[0].dense()[:, :, -3:])
    every = slice(None)
    for index in ((every, every, slice(0, 3), every), (every, every, every, slice(0, 3)), (0, every, every), (every, every, slice(-3, None, 2)), -1):
        with pytest.raises(attn.UnsupportedError, match="getitem"):
            masks[0][index]


def test_layers_that_share_with_none_of_their_kind_are_refused():
    config = transformers.Gemma4TextConfig(num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"], num_kv_shared_layers=2)
    with pytest.raises(attn.UnsupportedError, match="share K and V|transformers makes no cache"):
        QuantizedCache(config)
