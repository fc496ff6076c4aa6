"""The attention implementation `"attn"`: over a quantized cache by this library, over any other, or none, as `"sdpa"`."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .._errors import UnsupportedError
from ._handed import Handed, HandedRows
from ._layer import QuantizedLayer
from ._mask import PaddedRows, StepMask, make_mask


def use_masks(config: Any) -> None:
    """Registers the masks of `"attn"` for a model that has its attention under another name: transformers names a repository's by the repository, and gives
    it the masks of `"sdpa"`."""
    name = getattr(config, "_attn_implementation", None)
    if AttentionInterface().get(name) is attention:
        AttentionMaskInterface.register(name, make_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """Query `[batch, heads, tokens, dim]`, key and value `[batch, KV heads, tokens, dim]`; returns `[batch, tokens, heads, dim]`, and no weights."""
    if kwargs.get("output_attentions"):
        raise UnsupportedError("attn computes no attention weights; load the model with attn_implementation=\"eager\" for output_attentions=True")
    handed = next((x.handed for x in (key, value) if isinstance(x, HandedRows)), None)
    if handed is not None:
        modifiers = dict(scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
        return _over_cache(handed, module, (query, key, value), attention_mask, dropout, modifiers, kwargs), None
    if isinstance(attention_mask, StepMask):
        attention_mask.guard.check_nothing_waits(module)
        attention_mask = attention_mask.dense()
    if softcap is None and s_aux is None:
        options = dict(dropout=dropout, scaling=scaling, is_causal=is_causal, sliding_window=sliding_window, **kwargs)
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
    return _torch_attention(module, (query, key, value), attention_mask, dropout, scaling, is_causal, softcap, s_aux), None


@torch.compiler.disable
def _over_cache(
    handed: Handed,
    module: torch.nn.Module,
    rows: Tuple[torch.Tensor, HandedRows, HandedRows],
    mask: Any,
    dropout: float,
    modifiers: Dict[str, Any],
    others: Dict[str, Any],
) -> torch.Tensor:
    """Attention of a layer that waits, of query, K and V."""
    query, key, value = rows
    with handed.guard.undoing(max(handed.index, getattr(module, "layer_idx", None) or 0)):
        layer, shares = handed.guard.take(handed, key, value, module)
        _check_pass(query, handed.key, handed.value, shares, dropout, others)
        window = modifiers["sliding_window"]
        if window is not None and layer.window not in (None, window):
            raise UnsupportedError(f"this layer attends in a window of {window} tokens, but its configuration says {layer.window}; use transformers' own cache")
        window = window if layer.window is None else layer.window
        options = dict(
            # Heads may be stored with more dims than they have.
            scale=query.shape[-1] ** -0.5 if modifiers["scaling"] is None else modifiers["scaling"],
            softcap=modifiers["softcap"],
            # transformers' window counts the token itself.
            window_left=None if window is None else window - 1,
            chunk=layer.window if layer.is_chunked else None,
            sinks=layer.sinks_of(modifiers["sinks"], query.shape[2]),
            arithmetic=layer.arithmetic,
        )
        latents = handed.latents
        if latents is not None:
            query = latents.queries(query)
        step = _rows(layer, query, handed.key.shape[2], mask)
        out = (layer.attend_again if shares else layer.attend)(query, handed.key, handed.value, step, options)
        if latents is not None:
            out = latents.outputs(out)
        handed.guard.attended()
    return out


def _check_pass(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shares: bool, dropout: float, kwargs: Any) -> None:
    """Refuses what attention over a quantized cache is not defined for."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise UnsupportedError("a QuantizedCache has no gradients; call the model under torch.no_grad()")
    if dropout:
        raise UnsupportedError(f"dropout is {dropout}; a QuantizedCache is for inference: call model.eval()")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("this model adds a bias to its scores, which attn does not; use attn_implementation=\"sdpa\" with another cache")
    if query.shape[2] != key.shape[2] and not (shares and query.shape[2] < key.shape[2]):
        raise UnsupportedError(f"{query.shape[2]} query tokens attend over {key.shape[2]} new tokens; attn attends over a cache that gets the tokens of its queries")


def _rows(layer: QuantizedLayer, query: torch.Tensor, tokens: int, mask: Any) -> PaddedRows:
    """What the mask of a pass of so many tokens says of padding; refuses one that is not the layer's causal mask, whatever the module says of itself."""
    batch, _, q_len, _ = query.shape
    if isinstance(mask, StepMask):
        mask.check_sizes(batch, q_len, layer.seen + tokens)
        if mask.is_of(layer.window, layer.is_chunked):
            return mask.rows()
    elif mask is None and q_len == 1:
        # The newest token sees all.
        return PaddedRows(None, batch, q_len)
    elif mask is None:
        raise UnsupportedError("this model gives its attention no mask, so attn does not know which tokens see each other; use transformers' own cache")
    raise UnsupportedError(
        "this pass has a mask of its own (4-dimensional, packed, or with parts that see each other); attn attends under causal masks with padding on the left"
    )


def _torch_attention(
    module: torch.nn.Module,
    rows: Tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    dropout: float,
    scaling: Optional[float],
    is_causal: Optional[bool],
    softcap: Optional[float],
    sinks: Optional[torch.Tensor],
) -> torch.Tensor:
    """Attention with a soft cap or sinks over K and V as they are, which `"sdpa"` does not have."""
    query, key, value = rows
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    q_len, kv_len = query.shape[2], key.shape[2]
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal and q_len > 1:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    # A row that sees nothing, as of padding, gives zeros.
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :kv_len]
    weights = torch.nn.functional.dropout(weights, dropout, module.training).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()
