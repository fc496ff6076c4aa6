"""`QuantizedCache`: which layers of a model are quantized, and what holds for all of them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .._cache import Cache
from .._errors import ParameterError, UnsupportedError
from .._options import count, format_name, is_fast, is_of_latents, numbers
from ._attention import use_masks
from ._config import head_width, kinds_of, own_layers, sharing_of, windows_of
from ._guard import PassGuard
from ._hybrid import QuantizedHybridLayer
from ._latents import use_latents
from ._layer import QuantizedLayer, width_for
from ._mask import MaskTokens

Scales = Union[None, float, Sequence[float], Sequence[Sequence[float]]]


class QuantizedCache(TransformersCache):
    """A cache whose layers of full, sliding and chunked attention are quantized: `cache=` (before transformers 5.24 `past_key_values=`) of models with
    `attn_implementation="attn"`.

    A forward pass is one step for all layers: if it fails, the cache is as it was before, or the next call says so. A cache that holds layers of
    transformers' own beside quantized ones, such as those of linear attention, asks for `reset()` then.

    Args:
        config: the model's.
        format: of K and V, as for `attn.Cache`: `"int8"` (about half of bf16's bytes), `"int8/int4"`, `"int4"` (about a quarter), …; for models with latent attention also
            `"int8-latents"`, which stores a latent and a rotary key once, in half of int8's bytes, and `"bf16-latents"`.
        max_tokens: tokens that each row of the batch has room for; beyond it `CacheFullError`. If not given, pools grow by doubling, which copies
            them through the host: give it where lengths are known. Sliding layers hold their window, 128 tokens that can be taken back, and a piece of
            a prompt, whatever the lengths.
        page_size: tokens of a page: 16, 32, 64 or 128.
        arithmetic: `"fast"` for prompts by floats, which take two thirds of the time on a Hopper GPU; the same tokens whatever the batch and the chunks are
            promised by `"exact"` alone. As for `attn.Cache.attend`.
        k_scales, v_scales: static scales for `"fp8"` and `"int8-tensor"`, which need them: one number for all heads, or `[layers]` or `[layers, KV heads]`
            numbers.
        centres: as for `attn.Cache`: store keys without what a sequence's have in common; None: for formats that can, but with `"fast"`, which they make exact.
        checkpoints: as for `attn.Cache`: tokens from one length that `crop` can go back to, in formats with a window, to the next; 0 for none.

    Raises:
        UnsupportedError for models that it cannot serve; ParameterError.
    """

    def __init__(
        self,
        config: Any,
        format: str = "int8",
        *,
        max_tokens: Optional[int] = None,
        page_size: int = 64,
        arithmetic: str = "exact",
        k_scales: Scales = None,
        v_scales: Scales = None,
        centres: Optional[bool] = None,
        checkpoints: int = 0,
    ) -> None:
        if is_fast(arithmetic) and centres is None:
            centres = False
        decoder = config.get_text_config(decoder=True)
        layers = own_layers(config)
        windows = windows_of(decoder, layers)
        if not windows:
            raise UnsupportedError(
                f"no layer of this model ({type(config).__name__}) has full or sliding attention, which a QuantizedCache quantizes; use transformers' own cache"
            )
        if max_tokens is not None:
            max_tokens = count("max_tokens", max_tokens, 1)
        scales = _scales_of_layers(len(layers), k_scales=k_scales, v_scales=v_scales)
        # Refuses a format, page size or scales at once, not in the first pass.
        first = {name: x[:1] for name, x in scales[0].items()}
        self._latents = use_latents(decoder)
        dim = v_dim = head_width(decoder)
        if self._latents is not None:
            dim, v_dim = width_for(sum(self._latents)), width_for(self._latents[0])
        elif is_of_latents(format_name(format)):
            raise UnsupportedError(
                f"{format} is for models with latent attention whose caches hold latents, as of transformers 5.24; {type(config).__name__} gives its cache K and V: use int8"
            )
        of_first: Dict[str, Any] = dict(page_size=page_size, centres=centres, checkpoints=checkpoints, **first)
        Cache(format, heads=1, dim=dim, v_dim=v_dim, max_tokens=0, pages=0, device="cpu", **of_first)
        of_all: Dict[str, Any] = dict(max_tokens=max_tokens, page_size=page_size, arithmetic=arithmetic, centres=centres, checkpoints=checkpoints)
        sharing, kinds = sharing_of(decoder, windows), kinds_of(decoder, layers)
        quantized = {}
        for index, window in windows.items():
            of_layer: Dict[str, Any] = dict(is_chunked=kinds[index] == "chunked_attention", is_shared=index in sharing.values(), scales=scales[index])
            if isinstance(layers[index], LinearAttentionCacheLayerMixin):
                of_layer["states"] = {name: getattr(layers[index], name) for name in ("number_of_states",) if hasattr(layers[index], name)}
                quantized[index] = QuantizedHybridLayer(format, window=window, **of_layer, **of_all)
            else:
                quantized[index] = QuantizedLayer(format, window=window, **of_layer, **of_all)
        super().__init__(layers=[quantized.get(index, layer) for index, layer in enumerate(layers)])
        self.format = format
        self._guard = PassGuard(self.layers, quantized, sharing, decoder)
        use_masks(decoder)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools and of the 16-bit layers beside them."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                total += layer.stats().pool_bytes if layer.cache is not None else 0
            else:
                total += sum(x.nbytes for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if isinstance(x, torch.Tensor))
        return total

    # What transformers asks of a cache; torch.compile breaks its graphs at what a pass calls.

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Tuple[int, int]:
        tokens, offset = super().get_mask_sizes(query_length, layer_idx)
        # Of a layer of linear attention, transformers means the first that has K and V.
        asked = [layer for layer in [*self.layers[layer_idx : layer_idx + 1], *self.layers] if isinstance(layer, CacheLayerMixin)]
        # Masks of transformers' own layers are tensors.
        return (MaskTokens.of(tokens, self._guard) if isinstance(asked[0], QuantizedLayer) else tokens), offset

    @torch.compiler.disable
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tuple[Any, Any]:
        """Takes a pass's K and V of a layer, `[batch, KV heads, tokens, dim]`, and returns what its attention is to be given."""
        self._guard.check_layer(self.layers, layer_idx)
        if not isinstance(self.layers[layer_idx], QuantizedLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._latents is None or self._latents != (key_states.shape[-1], value_states.shape[-1]):
            if is_of_latents(self.format):
                raise UnsupportedError(f"this layer gives its cache K and V of {key_states.shape[-1]} and {value_states.shape[-1]} dims, and no latents; use int8")
            return self._guard.hand(layer_idx, key_states, value_states).rows()
        key = torch.cat([key_states, value_states], -1)
        return self._guard.hand(layer_idx, key, key_states).latent_rows(key_states, value_states)

    def reset(self) -> None:
        super().reset()
        self._guard.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens of every row: -n removes n; a positive number keeps as many, as older callers ask.

        Formats with a window go back by 256 tokens of the last pass, to the first 64 or fewer, and to the `checkpoints` of the cache.

        Raises:
            ShapeError for more than layers can give back; nothing is changed then.
        """
        if tokens_to_remove > 0:
            self._guard.undo()
            tokens_to_remove = -max(0, self.get_seq_length() - tokens_to_remove)
        self._guard.settle()
        for layer in self._quantized():
            layer.check_crop(-tokens_to_remove)
        with self._guard.changing():
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._check_rows(len(beam_idx))
        with self._guard.changing():
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._check_rows(max((len(layer.slots) for layer in self._quantized()), default=0) * repeats)
        with self._guard.changing():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._check_rows(0)
        with self._guard.changing():
            super().batch_select_indices(indices)

    def _check_rows(self, rows: int) -> None:
        self._guard.settle()
        for layer in self._quantized():
            layer.check_rows(rows)

    def _quantized(self) -> List[QuantizedLayer]:
        return [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]

    def __getstate__(self) -> Dict[str, Any]:
        self._guard.settle()
        return self.__dict__


def _scales_of_layers(layers: int, **given: Scales) -> List[Dict[str, List[float]]]:
    """Of each layer, the static scales of K and of V: a number for each head, or one for all."""
    found: List[Dict[str, List[float]]] = [{} for _ in range(layers)]
    for name, scales in given.items():
        if scales is None:
            continue
        if isinstance(scales, (int, float)):
            scales = [scales] * layers
        if hasattr(scales, "tolist"):
            scales = scales.tolist()
        if not isinstance(scales, (list, tuple)) or len(scales) != layers:
            raise ParameterError(f"{name} is {scales!r}; allowed: a number, or numbers [layers] or [layers, KV heads] of {layers} layers")
        for of_layer, own in zip(scales, found):
            own[name] = numbers(name, of_layer if isinstance(of_layer, (list, tuple)) else [of_layer])
    return found
