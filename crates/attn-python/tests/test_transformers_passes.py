"""A forward pass is one step for all layers of a quantized cache, over the K and V that each layer gave it; what is not is refused by name."""

import copy
import gc
import pickle
import warnings
import weakref

import attn
import pytest
from tiny_models import COMMON, PAST, REASON, config_of, device, generate, given, has_torch, padded, pair, prompt, without_gradients

if REASON is None:
    import torch
    import transformers
    from attn.transformers import QuantizedCache, QuantizedLayer
    from attn.transformers._handed import Handed
    from attn.transformers._mask import MaskTokens, StepMask
    from transformers import AutoModelForCausalLM, DynamicCache


class Stopped(BaseException):
    """What ends a pass from outside, as an interrupt does."""


def stop(*_):
    raise Stopped


def cache_of(config, model, ids, *options, **named):
    cache = QuantizedCache(config, *options, **named)
    model(ids, **given(cache))
    return cache


def hold(cache, tokens):
    """Whether all layers have so many tokens of each row, and say so."""
    quantized = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
    return cache.get_seq_length() == tokens and all(layer.lens == [tokens] * cache.batch_size for layer in quantized)


def random_model(config, implementation="attn"):
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def test_a_model_that_attends_twice_over_one_update_is_refused():
    """DiffLlama's two halves of V: each would be appended, and the logits would be another model's."""
    config = transformers.DiffLlamaConfig(**COMMON)
    cache = QuantizedCache(config)
    with pytest.raises(attn.UnsupportedError, match=r"layer 0 of DiffLlamaConfig computes with V \(chunk\)"):
        random_model(config)(prompt(1, 10), **given(cache))
    assert cache.get_seq_length() == 0 and not cache.layers[0].is_initialized


@pytest.mark.parametrize("what", ["twice", "other V", "V for K", "own K and V", "no mask"])
def test_an_attention_of_other_k_and_v_than_the_cache_was_given_is_refused(what, monkeypatch):
    """Also in the last layer, which no other layer's update follows."""
    config, _, ours = pair("llama")
    interface = transformers.AttentionInterface()["attn"]
    given_own = {}

    def attention(module, query, key, value, mask, **options):
        if module.layer_idx == 1:
            if what == "twice":
                interface(module, query, key, value, mask, **options)
            elif what == "other V":
                value = torch.zeros(value.shape)
            elif what == "V for K":
                key, value = value, key
            elif what == "own K and V":
                key, value = (torch.zeros(x.shape) for x in (key, value))
            else:
                mask = None
        return interface(module, query, key, value, mask, **options)

    transformers.AttentionInterface.register("attn_changed", attention)
    transformers.AttentionMaskInterface.register("attn_changed", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["attn"])
    ids = prompt(1, 10)
    cache = cache_of(config, ours, ids)
    ours.set_attn_implementation("attn_changed")
    with pytest.raises(attn.UnsupportedError, match="no mask" if what == "no mask" else r"layer 1 of LlamaConfig \(LlamaAttention\)"):
        ours(ids, **given(cache))
    assert hold(cache, 10)
    ours.set_attn_implementation("attn")
    straight = cache_of(config, ours, ids)
    assert torch.equal(ours(ids, **given(cache)).logits, ours(ids, **given(straight)).logits)


def test_the_mask_decides_and_not_what_a_module_says_of_itself():
    """BigBirdPegasus' decoder says `is_causal = False` and is given a causal mask."""
    config, own, ours = pair("llama")
    for layer in ours.model.layers:
        layer.self_attn.is_causal = False
    ids = prompt(1, 40)
    error = (ours(ids, **given(QuantizedCache(config, "f16"))).logits - own(ids).logits).abs().max()
    assert error < 5e-3 * own(ids).logits.std()


def test_masks_of_windows_and_of_chunks_are_told_apart():
    """Both say of themselves that they are local and of so many tokens."""
    config, _, _ = pair("mistral")
    masking = transformers.masking_utils
    sizes = dict(batch_size=1, q_length=40, kv_length=MaskTokens.of(40, QuantizedCache(config)._guard), attention_mask=None)
    options = dict(sizes, allow_is_causal_skip=True, local_size=24, device=torch.device("cpu"))
    functions = (masking.sliding_window_causal_mask_function(24), masking.chunked_causal_mask_function(24, torch.tensor([7])))
    for of_function, function in enumerate(functions):
        for is_chunked in (False, True):
            mask = StepMask(dict(options, mask_function=function))
            assert mask.is_of(24, is_chunked) == (bool(of_function) == is_chunked)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("kind, layer", [("llama", 1), ("gpt-oss", 1), ("deepseek", 1), ("gemma4", 1), ("gemma4", 2), ("gemma4", 3)])
def test_a_pass_that_fails_in_a_layer_leaves_the_cache_as_it_was(kind, layer, format, device):
    config, _, ours = pair(kind, device)
    ids = prompt(2, 70, device=device)
    cache, straight = (cache_of(config, ours, ids[:, :60], format) for _ in range(2))
    # Refused by the attention.
    other_mask = {"attention_mask": torch.ones(2, 1, 10, 70)}
    hook = ours.model.layers[layer].self_attn.register_forward_pre_hook(lambda module, args, options: (args, {**options, **other_mask}), with_kwargs=True)
    with pytest.raises(attn.UnsupportedError, match="mask of its own"):
        ours(ids[:, 60:], **given(cache))
    hook.remove()
    assert hold(cache, 60)
    wanted = ours(ids[:, 60:], **given(straight)).logits
    assert torch.equal(ours(ids[:, 60:], **given(cache)).logits, wanted)


def test_a_pass_that_is_stopped_from_outside_is_taken_back_by_the_next_call():
    config, _, ours = pair("llama")
    ids = prompt(2, 70)
    wanted = ours(ids[:, 60:], **given(cache_of(config, ours, ids[:, :60]))).logits
    for where in (ours.model.layers[0].mlp, ours.model.layers[1].self_attn):
        cache = cache_of(config, ours, ids[:, :60])
        hook = where.register_forward_pre_hook(stop)
        with pytest.raises(Stopped):
            ours(ids[:, 60:], **given(cache))
        hook.remove()
        assert cache.get_seq_length() == 60
        with pytest.raises(attn.UnsupportedError, match="ended at layer 0 of 2.*has 60 again: call the model again"):
            ours(ids[:, 60:], **given(cache))
        assert hold(cache, 60)
        assert torch.equal(ours(ids[:, 60:], **given(cache)).logits, wanted)
    for change in (lambda c: c.crop(-1), lambda c: c.reorder_cache(torch.tensor([1, 0])), lambda c: c.batch_repeat_interleave(2), copy.copy):
        cache = cache_of(config, ours, ids[:, :60])
        hook = ours.model.layers[1].self_attn.register_forward_pre_hook(stop)
        with pytest.raises(Stopped):
            ours(ids[:, 60:], **given(cache))
        hook.remove()
        with pytest.raises(attn.UnsupportedError, match="has 60 again"):
            change(cache)
        assert hold(cache, 60)
    # To keep so many tokens is right whatever the pass has left.
    cache = cache_of(config, ours, ids[:, :60])
    hook = ours.model.layers[1].self_attn.register_forward_pre_hook(stop)
    with pytest.raises(Stopped):
        ours(ids[:, 60:], **given(cache))
    hook.remove()
    cache.crop(55)
    assert hold(cache, 55)


def test_a_failed_pass_says_nothing_of_another_model():
    config, own, ours = pair("llama")
    ids = prompt(1, 10)
    failed = QuantizedCache(config)
    hook = ours.model.layers[0].self_attn.o_proj.register_forward_pre_hook(stop)
    with pytest.raises(Stopped):
        ours(ids, **given(failed))
    hook.remove()
    with pytest.raises(attn.UnsupportedError, match='attn_implementation="attn"'):
        own(ids, **given(QuantizedCache(config)))
    assert hold(cache_of(config, ours, ids), 10)
    ours(ids, **given(DynamicCache(config=config)))


def test_what_cannot_be_taken_back_asks_for_a_reset():
    config, _, ours = pair("mistral")
    ids = prompt(1, 900)
    cache = cache_of(config, ours, ids[:, :300])
    hook = ours.model.layers[1].self_attn.register_forward_pre_hook(stop)
    # Longer than what a sliding layer can give back.
    with pytest.raises(Stopped):
        ours(ids[:, 300:], **given(cache))
    hook.remove()
    for _ in range(2):
        with pytest.raises(attn.ShapeError, match=r"call cache.reset\(\)"):
            ours(ids[:, 300:301], **given(cache))
    cache.reset()
    assert torch.equal(ours(ids[:, :300], **given(cache)).logits, ours(ids[:, :300], **given(QuantizedCache(config))).logits)


def test_layers_of_transformers_own_are_not_left_with_tokens_of_a_failed_pass():
    """Three layers of linear attention run before the first quantized one, and cannot give tokens back."""
    config = transformers.Qwen3NextConfig(**{**COMMON, "num_hidden_layers": 4, "head_dim": 64, "num_experts": 2, "num_experts_per_tok": 2})
    model = random_model(config)
    ids = prompt(1, 40)
    right = torch.ones(1, 30)
    right[0, -3:] = 0
    cache = QuantizedCache(config, max_tokens=35)
    with pytest.raises(attn.UnsupportedError, match="left"):
        model(ids[:, :30], attention_mask=right, **given(cache))
    # The first pass leaves an empty cache.
    assert torch.equal(model(ids[:, :30], **given(cache)).logits, model(ids[:, :30], **given(QuantizedCache(config))).logits)
    with pytest.raises(attn.CacheFullError):
        model(ids[:, 30:], **given(cache))
    with pytest.raises(attn.ShapeError, match=r"layer 2, whose tokens or states are transformers' own.*reset\(\)"):
        model(ids[:, 30:32], **given(cache))


def test_room_is_named_by_max_tokens_and_no_layer_takes_tokens_beyond_it():
    config, _, ours = pair("gpt-oss")
    cache = cache_of(config, ours, prompt(1, 60), max_tokens=64)
    with pytest.raises(attn.CacheFullError, match="row 0 has 60 tokens and gets 10 more, but the cache was made with max_tokens=64"):
        ours(prompt(1, 10), **given(cache))
    assert hold(cache, 60)
    ours(prompt(1, 4), **given(cache))


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_a_model_that_copies_layers_of_its_cache_is_refused(mode):
    if not hasattr(transformers, "DoryConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Dory")
    layers = dict(num_hidden_layers=4, n_input_layers=1, n_recurrent_layers=2, n_output_layers=1, sliding_window=24, head_dim=64)
    config = transformers.DoryConfig(**{**COMMON, **layers}, recurrent_kv_cache_mode=mode)
    cache, model = QuantizedCache(config), random_model(config)
    with pytest.raises(attn.UnsupportedError, match="copies or exchanges layers of its cache|reads K and V of its cache itself"):
        for _ in range(2):
            model(prompt(1, 10), **given(cache))


def test_a_cache_of_another_number_of_layers_is_refused():
    config, _, ours = pair("llama")
    for layers in (1, 6):
        with pytest.raises(attn.UnsupportedError, match=f"the model has 2 layers, but the cache is for LlamaConfig, which has {layers}"):
            ours(prompt(1, 10), **given(QuantizedCache(config_of("llama", num_hidden_layers=layers))))


def test_a_model_whose_attention_is_its_own_code_is_refused_by_a_sentence():
    for config in (
        transformers.BloomConfig(hidden_size=256, n_head=4, n_layer=2, vocab_size=300),
        transformers.MptConfig(d_model=256, n_heads=4, n_layers=2, vocab_size=300),
        transformers.GPTNeoXJapaneseConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=2, vocab_size=300),
    ):
        with pytest.raises(attn.UnsupportedError, match="attention is its own code"):
            random_model(config)(prompt(1, 10), **given(QuantizedCache(config)))
    # Without our cache it gets the mask that "sdpa" does.
    config = transformers.BloomConfig(hidden_size=256, n_head=4, n_layer=2, vocab_size=300)
    random_model(config)(prompt(1, 10))


def test_configurations_whose_layers_differ_are_read_or_refused():
    for made in (transformers.MambaConfig, transformers.FalconMambaConfig, transformers.RwkvConfig, transformers.xLSTMConfig):
        with pytest.raises(attn.UnsupportedError, match="no layer of this model.*attention"):
            QuantizedCache(made())
    # Before 5.24, transformers' own cache of it has no layers.
    if PAST == "cache":
        QuantizedCache(transformers.Gemma4TextConfig(num_kv_shared_layers=0))


def test_a_static_cache_of_transformers_gets_what_sdpa_gets():
    """generate makes its masks ahead and passes them through the mask functions twice."""
    _, own, ours = pair("gemma3", attn_logit_softcapping=None)
    own.set_attn_implementation("sdpa")
    ids, mask = padded([prompt(30), prompt(12, seed=5)])
    wanted, found = (generate(model, None, ids, mask, cache_implementation="static") for model in (own, ours))
    assert torch.equal(found, wanted)


def test_a_compiled_model_computes_the_same():
    config, _, ours = pair("llama")
    compiled, ids = torch.compile(ours, backend="eager"), prompt(2, 30)
    cache, straight = QuantizedCache(config), QuantizedCache(config)
    for piece in (ids[:, :20], ids[:, 20:21], ids[:, 21:]):
        assert torch.equal(compiled(piece, **given(cache)).logits, ours(piece, **given(straight)).logits)


def test_a_deep_copy_goes_on_alone():
    """transformers' recipe for a prefix that several prompts share."""
    config, _, ours = pair("gemma3")
    ids = prompt(2, 330)
    prefix = cache_of(config, ours, ids[:, :300])
    copied = copy.deepcopy(prefix)
    wanted = ours(ids[:, 300:], **given(prefix)).logits
    assert hold(copied, 300) and hold(prefix, 330)
    assert torch.equal(ours(ids[:, 300:], **given(copied)).logits, wanted)


def test_a_cache_is_pickled_while_it_is_empty_and_refused_with_tokens():
    config, _, ours = pair("llama")
    ids = prompt(1, 40)
    wanted = ours(ids, **given(QuantizedCache(config, "int4"))).logits
    loaded = pickle.loads(pickle.dumps(QuantizedCache(config, "int4")))
    assert torch.equal(ours(ids, **given(loaded)).logits, wanted)
    with pytest.raises(attn.UnsupportedError, match="cannot be pickled.*copy.deepcopy makes another"):
        pickle.dumps(loaded)
    assert hold(loaded, 40) and hold(copy.deepcopy(loaded), 40)


@pytest.mark.parametrize("format", ["int8-tensor", "fp8"])
def test_static_formats_ask_for_their_scales(format):
    config, own, ours = pair("llama")
    with pytest.raises(attn.ParameterError, match=f"k_scales is missing: {format} stores"):
        QuantizedCache(config, format)
    with pytest.raises(attn.ParameterError, match="of 2 layers"):
        QuantizedCache(config, format, k_scales=[0.1] * 3, v_scales=0.1)
    ids = prompt(1, 40)
    wanted, logits = own(ids).logits, []
    for scales in (0.04, [0.04, 0.04], [[0.04, 0.04]] * 2):
        logits.append(ours(ids, **given(QuantizedCache(config, format, k_scales=scales, v_scales=scales))).logits)
        assert torch.equal(logits[0], logits[-1])
    assert (logits[0] - wanted).abs().max() < 0.5 * wanted.std()


def test_nothing_warns_in_the_spelling_of_this_version():
    config, _, ours = pair("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(ours, QuantizedCache(config), prompt(1, 10))


def test_k_and_v_of_a_pass_are_free_behind_it():
    """Of the last layer, of those whose K and V others share, and of latents, which no later pass replaces."""
    for kind in ("llama", "gemma4", "deepseek"):
        config, _, ours = pair(kind)
        cache, held = QuantizedCache(config), []
        hand = cache._guard.hand

        def noted(index, key, value):
            held.extend(map(weakref.ref, (key, value)))
            return hand(index, key, value)

        cache._guard.hand = noted
        with torch.no_grad():
            ours(prompt(1, 20), **given(cache))
        gc.collect()
        assert len(held) >= 4 and not any(x() is not None for x in held), kind
        # What stands for them still tells its shape, and is itself where there is nothing to convert.
    handed = Handed(cache._guard, 0, torch.ones(1, 2, 3, 64), torch.ones(1, 2, 3, 128))
    key, value = handed.rows()
    handed.drop()
    assert (key.size(), key.size(-1), value.size(3), key.dim(), value.ndim) == ((1, 2, 3, 64), 64, 128, 4, 4)
    assert key.to(torch.float32) is key and value.to("cpu", memory_format=torch.contiguous_format) is value
    with pytest.raises(attn.UnsupportedError, match=r"computes with K \(to\)"):
        key.to(torch.float16)


@pytest.mark.parametrize("how", ["data", "in place", "another", "inference"])
def test_sinks_are_those_of_the_weights_in_each_pass(how):
    config, own, ours = pair("gpt-oss")
    if how == "inference":
        with torch.inference_mode():
            made = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="attn").eval()
            made.load_state_dict(own.state_dict())
        ours = made
    ids = prompt(1, 34)
    cache = QuantizedCache(config, "f16")
    theirs = DynamicCache(config=config)
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        # A prompt, and then steps of one token each behind a change.
        pieces = ids.split([30, 1, 1, 1, 1], 1)
        for i, piece in enumerate(pieces):
            found, wanted = ours(piece, **given(cache)).logits, own(piece, **given(theirs)).logits
            assert (found - wanted).abs().max() < 5e-3 * wanted.std(), i
            for layers in (own.model.layers, ours.model.layers):
                for layer in layers:
                    new = layer.self_attn.sinks.detach().clone() + 1.5
                    if how == "data" or layers is own.model.layers:
                        layer.self_attn.sinks.data.copy_(new)
                    elif how == "another":
                        layer.self_attn.sinks = torch.nn.Parameter(new, requires_grad=False)
                    else:
                        layer.self_attn.sinks.copy_(new)


def test_sinks_on_a_gpu_are_copied_once_a_sequence_and_where_they_change():
    layer, copies = QuantizedLayer("int8"), []

    class OnAGpu:
        """As much of a tensor as a layer asks for its sinks."""

        device, _version = torch.device("cuda", 0), 0

        def __init__(self, at, is_inference=False):
            self.at, self.is_inference = at, lambda: is_inference

        def data_ptr(self):
            return self.at

        def detach(self):
            copies.append(self.at)
            return torch.tensor([float(self.at)])

    for is_inference in (False, True):
        sinks, layer.seen = OnAGpu(8, is_inference), 0
        copies.clear()
        for tokens, seen, at, count in ((1, 0, 8, 1), (1, 1, 8, 1), (4, 5, 8, 1), (65, 9, 8, 2), (1, 70, 8, 2), (1, 71, 9, 3), (1, 72, 9, 3), (1, 0, 9, 4)):
            sinks.at, layer.seen = at, seen
            assert layer.sinks_of(sinks, tokens) == [at] and len(copies) == count, (tokens, seen)
    sinks = OnAGpu(9)
    layer.seen = 5
    layer.sinks_of(sinks, 1)
    copies.clear()
    sinks._version = 1
    assert layer.sinks_of(sinks, 1) == [9] and copies == [9]
