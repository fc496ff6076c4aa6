"""What a model's configuration says of its attention: the widths of heads, windows, latents, and layers that share K and V."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from .._attn import HEAD_DIMS
from .._errors import UnsupportedError
from ._layer import width_for

# Of transformers' cache, the layers of K and V, alone or beside states of linear attention.
_OURS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)

def own_layers(config: Any) -> List[Any]:
    """The layers of transformers' own cache for a model."""
    try:
        return DynamicCache(config=config).layers
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedError(f"transformers makes no cache for this model ({type(config).__name__}): {reason}; use the model's own cache") from error


def _read(config: Any, name: str) -> Any:
    """An attribute of a configuration: None where it has none, `...` where its layers have different ones."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        # transformers' AmbiguousGlobalPerLayerAttributeError, which older versions do not have.
        return ...


def head_width(config: Any) -> int:
    """Dims with which the model's heads are stored; the fewest that attn has where the configuration does not say, so that the first pass does.

    Raises:
        UnsupportedError for a model without heads, or of wider ones than attn has.
    """
    dim, hidden, heads = (_read(config, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if latent_dims(config):
        # Of the heads that older versions of transformers expand latents to.
        return HEAD_DIMS[0]
    if isinstance(dim, int) and dim:
        return width_for(dim)
    if dim is None and isinstance(hidden, int) and isinstance(heads, int):
        return width_for(hidden // heads)
    if dim is None and heads is None:
        raise UnsupportedError(f"no layer of this model has attention heads, as its configuration ({type(config).__name__}) tells; use transformers' own cache")
    return HEAD_DIMS[0]


def kinds_of(config: Any, layers: List[Any]) -> List[Optional[str]]:
    """What each layer of a decoder's configuration attends to, in transformers' words; None where it does not say."""
    return list(_read(config, "layer_types") or [None] * len(layers))


def windows_of(config: Any, layers: List[Any]) -> Dict[int, Optional[int]]:
    """The layers that transformers makes for a decoder's configuration which have full, sliding or chunked attention; the windows of those, or the tokens of a
    chunk."""
    # Without kinds, which layers are chunked is in the model's code alone.
    if not _read(config, "layer_types") and _read(config, "attention_chunk_size"):
        return {}
    ours = {i: layer for i, layer in enumerate(layers) if type(layer) in _OURS}
    return {i: getattr(layer, "sliding_window", None) for i, layer in ours.items()}


def sharing_of(config: Any, windows: Dict[int, Optional[int]]) -> Dict[int, int]:
    """The layers that attend over K and V of another, and that other one: the last before them all that is of the same kind (Gemma 3n, Gemma 4)."""
    shared, kinds = _read(config, "num_kv_shared_layers"), _read(config, "layer_types")
    if not shared:
        return {}
    own = kinds[:-shared] if isinstance(kinds, (list, tuple)) else []
    last = {kind: index for index, kind in enumerate(own) if index in windows}
    if not own or any(kind not in last for kind in kinds[-shared:]):
        raise UnsupportedError(f"{shared} layers of this model share K and V with others, and its configuration does not say with which; use transformers' own cache")
    return {len(own) + index: last[kind] for index, kind in enumerate(kinds[-shared:])}


def latent_dims(config: Any) -> Optional[Tuple[int, int]]:
    """Dims of latents and of rotary keys; None for a model whose heads have K and V of their own."""
    dims = tuple(_read(config, name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if ... in dims:
        raise UnsupportedError("layers of this model have latents of unlike ranks, which attn does not tell apart; use transformers' own cache")
    return dims if all(isinstance(n, int) and n for n in dims) else None
