"""Models whose layers have states of linear attention beside K and V (Falcon H1, Zamba), on a quantized cache."""

import attn
import pytest
from tiny_models import REASON, generate, given, has_torch, padded, pair, prompt, without_gradients

if REASON is None:
    import torch
    from attn.transformers import QuantizedCache, QuantizedLayer


def test_logits_in_pieces_are_those_of_the_models_own_attention():
    """Kills states that a piece does not find, and K and V that are not quantized."""
    config, own, ours = pair("falcon-h1")
    ids = prompt(2, 60)
    wanted = own(ids).logits
    for format, bound in (("f16", 5e-3), ("int8", 0.2)):
        cache = QuantizedCache(config, format)
        found = torch.cat([ours(piece, **given(cache)).logits for piece in ids.split((40, 1, 19), 1)], 1)
        assert (found - wanted).abs().max() < bound * wanted.std()
        assert all(isinstance(layer, QuantizedLayer) and layer.lens == [60, 60] for layer in cache.layers)
        assert format == "f16" or not torch.equal(found, wanted)
        cache.reset()
        assert cache.get_seq_length() == 0
        again = ours(ids[:, :40], **given(cache)).logits
        assert (again - wanted[:, :40]).abs().max() < bound * wanted.std()


def test_rows_are_exchanged_with_their_states():
    config, _, ours = pair("falcon-h1")
    first, second = prompt(1, 30), prompt(1, 30, seed=9)
    cache, straight = QuantizedCache(config), QuantizedCache(config)
    ours(torch.cat([first, second]), **given(cache))
    ours(torch.cat([second, first]), **given(straight))
    cache.reorder_cache(torch.tensor([1, 0]))
    token = prompt(2, 1)
    found, wanted = (ours(token, **given(x)).logits for x in (cache, straight))
    assert (found - wanted).abs().max() < 1e-3 * wanted.std()


def test_tokens_are_not_taken_back_from_states():
    config, _, ours = pair("falcon-h1")
    ids = prompt(1, 31)
    cache, straight = QuantizedCache(config), QuantizedCache(config)
    for x in (cache, straight):
        ours(ids[:, :30], **given(x))
    with pytest.raises(attn.UnsupportedError, match="states of linear attention, which do not go back"):
        cache.crop(-3)
    assert torch.equal(ours(ids[:, 30:], **given(cache)).logits, ours(ids[:, 30:], **given(straight)).logits)
    with pytest.raises(attn.UnsupportedError, match="repeat the prompts"):
        cache.batch_repeat_interleave(2)


def test_a_pass_that_fails_asks_for_a_reset():
    config, _, ours = pair("falcon-h1")
    ids = prompt(1, 40)
    cache = QuantizedCache(config)
    ours(ids[:, :30], **given(cache))
    mask = {"attention_mask": torch.ones(1, 1, 10, 40)}
    hook = ours.model.layers[1].self_attn.register_forward_pre_hook(lambda module, args, options: (args, {**options, **mask}), with_kwargs=True)
    with pytest.raises(attn.UnsupportedError, match="mask of its own"):
        ours(ids[:, 30:], **given(cache))
    hook.remove()
    with pytest.raises(attn.ShapeError, match=r"after layer 1, whose tokens or states.*cache.reset"):
        ours(ids[:, 30:], **given(cache))
    cache.reset()
    assert torch.equal(ours(ids, **given(cache)).logits, ours(ids, **given(QuantizedCache(config))).logits)


def test_a_batch_generates_what_its_rows_do_alone():
    config, _, ours = pair("falcon-h1")
    prompts = [prompt(n, seed=n) for n in (20, 20)]
    alone = [generate(ours, QuantizedCache(config), p[None])[0, 20:] for p in prompts]
    ids, mask = padded(prompts)
    batch = generate(ours, QuantizedCache(config), ids, mask)[:, 20:]
    assert all(torch.equal(a, b) for a, b in zip(alone, batch))
