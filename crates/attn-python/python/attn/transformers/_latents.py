"""Latent attention (MLA, DeepSeek-V2) of transformers' models in its absorbed form: each token is stored as one latent and one rotary key for all heads.

Such a model gives its cache latents and rotary keys, and its `expand_kv` makes K and V of all heads of what the cache returns. Here nothing is expanded. With
the two parts `W_k` and `W_v` of a head's rows of `kv_b_proj`, a latent `c` and a rotary key `r`, a score is `q_c·(W_k c) + q_r·r = (W_kᵀ q_c)·c + q_r·r`, and
an output is `Σ w W_v c = W_v Σ w c`: attention of queries `[W_kᵀ q_c, q_r]` over keys `[c, r]` and values `c`, which are one head for all query heads.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Optional, Tuple

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from .._errors import UnsupportedError
from ._config import latent_dims
from ._handed import HandedRows

_OWN_CACHE = "use transformers' own cache"
# Modules whose `expand_kv` has been found to be what this file takes it for.
_checked: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def use_latents(config: Any) -> Optional[Tuple[int, int]]:
    """Makes `expand_kv` of a model's attention take what a `QuantizedCache` returns; other arguments get what they got before.

    Returns the dims of latents and of rotary keys, `None` for a model whose cache holds K and V of heads.
    """
    dims = latent_dims(config)
    if dims is None or type(config) not in MODEL_MAPPING:
        return None
    models = sys.modules[MODEL_MAPPING[type(config)].__module__]
    classes = [x for x in vars(models).values() if isinstance(x, type) and "expand_kv" in vars(x)]
    for x in classes:
        if not hasattr(x.expand_kv, "attn_wraps"):
            x.expand_kv = _absorbing(x.expand_kv)
    return dims if classes else None


def _absorbing(expand_kv: Callable) -> Callable:
    @functools.wraps(expand_kv)
    def wrapped(self: torch.nn.Module, latents: Any, rotary: Any) -> Tuple[Any, Any]:
        if not isinstance(latents, HandedRows):
            return expand_kv(self, latents, rotary)
        return _absorbed(self, expand_kv, latents, rotary)

    wrapped.attn_wraps = expand_kv
    return wrapped


@torch.compiler.disable
def _absorbed(module: torch.nn.Module, expand_kv: Callable, latents: HandedRows, rotary: Any) -> Tuple[HandedRows, HandedRows]:
    handed = latents.handed
    with handed.guard.undoing(handed.index):
        if not isinstance(rotary, HandedRows) or rotary.handed is not handed:
            raise UnsupportedError(f"{type(module).__name__} expands latents with other rotary keys than its cache returned; {_OWN_CACHE}")
        made = Latents(module, latents.shape[-1])
        if module not in _checked:
            made.check(module, expand_kv, rotary.shape[-1])
            _checked.add(module)
        # Shapes alone: of no memory.
        batch, _, tokens, _ = latents.shape
        like = torch.empty(0, dtype=latents.dtype, device=latents.device)
        rows = (like.new_empty(1).expand(batch, made.heads, tokens, dim) for dim in (made.nope_dim + rotary.shape[-1], made.v_dim))
        return handed.expanded(made, tuple(rows))


class Latents:
    """What a layer's `kv_b_proj` makes of latents, moved to its queries and its outputs."""

    def __init__(self, module: torch.nn.Module, rank: int) -> None:
        linear = getattr(module, "kv_b_proj", None)
        self.name = type(module).__name__
        if type(linear) is not torch.nn.Linear or linear.bias is not None or linear.in_features != rank:
            raise UnsupportedError(
                f"{self.name} expands latents by {linear!r}, where attn absorbs a torch.nn.Linear of {rank} features without bias; {_OWN_CACHE}"
            )
        self.nope_dim, self.v_dim = module.qk_nope_head_dim, module.v_head_dim
        rows = linear.weight.unflatten(0, (-1, self.nope_dim + self.v_dim))
        self.heads = rows.shape[0]
        # `[heads, dims of K or of V, rank]`.
        self._of_k, self._of_v = rows.split([self.nope_dim, self.v_dim], 1)

    def check(self, module: torch.nn.Module, expand_kv: Callable, rotary_dim: int) -> None:
        """Expands two tokens as the model does, and refuses a model that makes other K and V of them than this class takes them for."""
        weight = self._of_k
        seeded = torch.Generator().manual_seed(1)
        latent, rotary = (torch.randn(1, 1, 2, dim, generator=seeded).to(weight) for dim in (weight.shape[2], rotary_dim))
        wanted = torch.cat([latent @ weight.transpose(1, 2), rotary.expand(-1, self.heads, -1, -1)], -1), latent @ self._of_v.transpose(1, 2)
        for found, of_ours in zip(expand_kv(module, latent, rotary), wanted):
            if found.shape != of_ours.shape or not torch.allclose(found, of_ours, rtol=0.05, atol=0.01 * float(of_ours.abs().max())):
                raise UnsupportedError(f"{self.name} makes K and V of latents otherwise than by its kv_b_proj alone; {_OWN_CACHE}")

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, tokens, dims of K]` as `[batch, heads, tokens, rank + rotary dims]`."""
        latent, rotary = query[..., : self.nope_dim], query[..., self.nope_dim :]
        return torch.cat([latent @ self._of_k, rotary], -1)

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, heads, rank]` as `[batch, tokens, heads, dims of V]`."""
        return (out.transpose(1, 2) @ self._of_v.transpose(1, 2)).transpose(1, 2)
