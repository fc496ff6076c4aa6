"""A quantized cache under Hugging Face models, transformers 5.

    from attn.transformers import QuantizedCache
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attn")
    model.generate(**inputs, cache=QuantizedCache(model.config, format="int8"))

Before transformers 5.24, `cache=` is `past_key_values=`. Importing this module registers the attention implementation `"attn"`. Layers of full, sliding
and chunked attention keep K and V in pages of this library and attend over them: prompts, decoding, verified drafts, batches padded on the left. A sliding
or chunked layer drops the pages that its window has left. Of layers that have states of linear attention, too, K and V are quantized. Other layers keep
transformers' own caches in the model's precision, and are attended by torch. With another cache, or none, `"attn"` computes what `"sdpa"` does.

Each layer has an `attn.Cache` of its own, not one of several layers: transformers runs a layer over a whole prompt, which formats with a window take in
pieces, each appended and attended before the next, and a cache of several layers counts a step's tokens once for all of them.

A forward pass is one step for all layers: a pass that fails leaves the cache as it was. Refused with a sentence, never computed wrongly: masks other
than causal ones with padding on the left, models that do not attend each layer once a pass over the K and V that they gave its cache, gradients, and a
`QuantizedCache` under another attention implementation.

Layers that attend over an earlier layer's K and V (Gemma 3n, Gemma 4) store nothing; a prompt of several pieces is appended once more for each of them, into
pages that are free again afterwards. Models with latent attention (MLA) store latents and rotary keys and are attended in the absorbed form: `expand_kv` of
their attention classes, which would make K and V of all heads, is wrapped when the first `QuantizedCache` for such a model is made, and for any other cache
does what it did.
"""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ._attention import attention
from ._cache import QuantizedCache
from ._layer import QuantizedLayer
from ._mask import make_mask

__all__ = ["QuantizedCache", "QuantizedLayer"]

AttentionInterface.register("attn", attention)
AttentionMaskInterface.register("attn", make_mask)
