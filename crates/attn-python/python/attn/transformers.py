"""A quantized cache under Hugging Face models, transformers 5.

    from attn.transformers import QuantizedCache
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attn")
    model.generate(**inputs, past_key_values=QuantizedCache(model.config, format="int8"))

Importing this module registers the attention implementation `"attn"`. Layers of full and of sliding attention keep K and V in pages of this library
and attend over them: prompts, decoding, verified drafts, batches padded on the left. A sliding layer drops the pages that its window has left. Other
layers keep transformers' own caches in the model's precision, and are attended by torch. With another cache, or none, `"attn"` computes what `"sdpa"`
does.

Each layer has an `attn.Cache` of its own, not one of several layers: transformers runs a layer over a whole prompt, which formats with a window take in
pieces, each appended and attended before the next, and a cache of several layers counts a step's tokens once for all of them.

Refused with a sentence, never computed wrongly: masks other than causal ones with padding on the left, K and V of different dims, models that share K
and V between layers, gradients, and a `QuantizedCache` under another attention implementation.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from ._cache import Cache, CacheStats
from ._errors import ParameterError, ShapeError, UnsupportedError
from ._options import is_fast

__all__ = ["QuantizedCache", "QuantizedLayer"]

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
# Query tokens of a piece: in formats whose newest tokens have residuals, those of one append can be queries at once, and be taken back; in sliding
# layers, a piece is what the pool holds beside a window.
_PIECE = 256
# Tokens that are dropped together at the least.
_TILE = 64
# Tokens that can be taken back from a sliding layer, as rejected drafts are: their windows are held, too.
_TAKEN_BACK = 128
# Tokens that a pool without `max_tokens` begins with room for.
_FIRST_TOKENS = 512

# The layer of this thread that waits for its attention.
_WAITING = threading.local()


class StepMask:
    """A forward pass's mask: what it hides, and as torch's attention takes it.

    Models pass it on as they got it.
    """

    def __init__(self, arguments: Dict[str, Any]) -> None:
        self._arguments = arguments
        self._dense: Optional[torch.Tensor] = None
        self._has_dense = False
        self._rows: Optional["PaddedRows"] = None

    def is_of(self, window: Optional[int]) -> bool:
        """Whether it hides what comes later, what lies `window` tokens back or more, padding, and nothing else."""
        arguments = self._arguments
        if arguments.get("use_vmap"):
            return False
        if window is None:
            return arguments["mask_function"] is causal_mask_function
        # Packed and overlaid masks of a window do not allow the skip.
        return bool(arguments.get("allow_is_causal_skip")) and arguments.get("local_size") == window

    def dense(self) -> Optional[torch.Tensor]:
        """Booleans `[batch, 1, query tokens, tokens]`; None for a causal mask that torch makes itself."""
        if not self._has_dense:
            self._dense, self._has_dense = sdpa_mask(**self._arguments), True
        return self._dense

    def rows(self) -> "PaddedRows":
        """Which tokens are padding, looked at once for all layers."""
        if self._rows is None:
            arguments = self._arguments
            self._rows = PaddedRows(arguments["attention_mask"], arguments["batch_size"], arguments["q_length"])
        return self._rows

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            f"this model takes its mask apart ({name}), which attn_implementation=\"attn\" does not give as a tensor; use \"sdpa\" with another cache"
        )


class PaddedRows:
    """The rows of a batch: how many tokens each gets in this pass, and how many it had."""

    def __init__(self, padding: Optional[torch.Tensor], batch: int, q_len: int) -> None:
        self.valid: Optional[torch.Tensor] = None
        self.counts = [q_len] * batch
        self.before: Optional[List[int]] = None
        if padding is None:
            return
        if padding.dim() != 2:
            raise UnsupportedError(f"the attention mask has {padding.dim()} dims; attn attends under masks [batch, tokens], padded on the left")
        valid = padding[:, -q_len:].bool()
        # One copy from the device for all that is asked.
        found = torch.stack([valid.sum(1), padding[:, :-q_len].sum(1), (valid[:, 1:] < valid[:, :-1]).any(1)]).tolist()
        self.counts, self.before, holes = found
        if any(holes) or any(had and n < q_len for had, n in zip(self.before, self.counts)):
            raise UnsupportedError(
                "the attention mask hides tokens behind others that it shows; attn attends under padding on the left alone: set tokenizer.padding_side = \"left\""
            )
        if min(self.counts) < q_len:
            self.valid = valid


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Optional[torch.Tensor] = None,
    **options: Any,
) -> StepMask:
    """What transformers calls to make a mask of a kind of layer."""
    sizes = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset)
    return StepMask(dict(sizes, mask_function=mask_function, attention_mask=attention_mask, **options))


class QuantizedLayer(CacheLayerMixin):
    """K and V of one layer of full or sliding attention, in pages of this library.

    `update` hands its tokens on to the attention that follows, which appends and attends: only there is it known which are padding. `window` is
    transformers' `sliding_window`: tokens that a token sees, itself counted.
    """

    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        format: str = "int8",
        *,
        max_tokens: Optional[int] = None,
        page_size: int = 64,
        arithmetic: str = "exact",
        window: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.format, self.max_tokens, self.page_size, self.arithmetic = format, max_tokens, page_size, arithmetic
        self.window, self.is_sliding = window, window is not None
        self.cache: Optional[Cache] = None
        # The sequence of each row of the batch.
        self.slots: List[int] = []
        # Tokens that each row has seen, padding included.
        self.seen = 0
        # What the pool was made for: tokens of a row that it holds, rows.
        self._room = self._rows = 0
        self._waits = False
        self._sinks: Tuple[Any, Optional[List[float]]] = (None, None)

    # What transformers asks of a layer.

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[-1] != value_states.shape[-1]:
            raise UnsupportedError(f"K has {key_states.shape[-1]} dims, and V {value_states.shape[-1]}; attn attends over heads whose K and V have as many")
        self.device, self.dtype = key_states.device, key_states.dtype
        batch, self._heads, tokens, self._dim = key_states.shape
        self.slots = []
        room = self.max_tokens or max(_FIRST_TOKENS, 2 * tokens)
        if self.window is not None:
            held = self.window + _TAKEN_BACK + max(_TILE, self.page_size) + _PIECE
            room = min(held, self.max_tokens or held)
        self._make(room, batch)
        self.slots = list(range(batch))
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Takes a pass's K and V, `[batch, heads, tokens, dim]`, and returns them for the attention."""
        waiting = getattr(_WAITING, "layer", None)
        if waiting is not None and waiting._waits:
            waiting._waits, _WAITING.layer = False, None
            raise UnsupportedError(
                "a QuantizedCache was given to a model whose attention is not \"attn\"; load it with attn_implementation=\"attn\", "
                "or call model.set_attn_implementation(\"attn\")"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.slots):
            raise ShapeError(f"the batch has {key_states.shape[0]} rows, but the cache was begun with {len(self.slots)}; use a new cache, or reset this one")
        self._waits, _WAITING.layer = True, self
        key_states._attn_layer = self
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> Tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return self.max_tokens or -1

    @property
    def batch_size(self) -> int:
        return len(self.slots)

    def reset(self) -> None:
        if self.cache is not None:
            for slot in self.slots:
                self.cache.free(slot)
        self.seen, self.is_initialized = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens of every row: -n removes n; a positive number keeps as many, as older callers ask."""
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if removed == 0 or self.cache is None:
            return
        lens, first = self.cache.lens, self.cache.first_tokens
        kept = {slot: max(0, lens[slot] - removed) for slot in self.slots}
        if any(n and first[slot] > self._first_needed(n) for slot, n in kept.items()):
            raise ShapeError(
                f"{removed} tokens cannot be taken back from a sliding layer, which holds the windows of its newest {_TAKEN_BACK}; reset the cache and begin again"
            )
        for slot, tokens in kept.items():
            self.cache.truncate(slot, tokens)
        self.seen -= min(removed, self.seen)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rearrange([row for row in range(len(self.slots)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(len(self.slots))[indices.cpu()]
        self._rearrange(rows.tolist())

    def offload(self) -> None:
        raise UnsupportedError("a QuantizedCache is not moved to the CPU between layers; make it with a smaller format")

    prefetch = offload

    # Memory.

    def _make(self, room: int, rows: int) -> None:
        """A cache of `room` tokens for each of `rows` rows, and in it the rows that there are."""
        if self.slots and any(self.cache.first_tokens[slot] for slot in self.slots):
            raise UnsupportedError("a sliding layer that has dropped tokens gets no more rows; begin with a batch as large as it becomes")
        shape = dict(heads=self._heads, dim=self._dim, page_size=self.page_size, max_q_len=_PIECE, device=_device_name(self.device))
        pages = rows * Cache(self.format, max_tokens=0, pages=0, **shape).pages_for(room)
        cache = Cache(self.format, max_tokens=0, pages=pages, sequences=rows, **shape)
        for row, slot in enumerate(self.slots):
            cache.restore(row, self.cache.save(slot))
        self.slots = list(range(len(self.slots)))
        self.cache, self._room, self._rows = cache, room, rows

    def _grow(self, needed: int) -> None:
        """Room for `needed` tokens of each row, unless the user has said how many there are, or the window does."""
        if needed > self._room and self.max_tokens is None and self.window is None:
            self._make(max(needed, 2 * self._room), self._rows)

    def _first_needed(self, tokens: int) -> int:
        """The first token that queries behind `tokens` tokens see."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)

    def _drop(self) -> None:
        """Frees the pages that no window sees any more, nor would if drafts were taken back."""
        if self.window is None:
            return
        lens = self.cache.lens
        for slot in self.slots:
            self.cache.drop_before(slot, self._first_needed(max(0, lens[slot] - _TAKEN_BACK)))

    def _rearrange(self, rows: List[int]) -> None:
        """Makes row i what row `rows[i]` was; tokens that rows have in common are shared."""
        if self.cache is None:
            return
        if len(rows) > self._rows:
            self._make(self._room, len(rows))
        taken = set(self.slots)
        free = [slot for slot in range(self.cache.sequences) if slot not in taken]
        if len(free) < len(rows):
            added, first = len(rows) - len(free), self.cache.sequences
            self.cache.add_sequences(added)
            free += range(first, first + added)
        new = free[: len(rows)]
        for slot, row in zip(new, rows):
            self.cache.fork(self.slots[row], slot)
        for slot in self.slots:
            self.cache.free(slot)
        self.slots = new

    def stats(self) -> Optional[CacheStats]:
        """Pages, bytes and tokens; None before the first pass."""
        return None if self.cache is None else self.cache.stats()

    # Attention.

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PaddedRows, options: Dict[str, Any]) -> torch.Tensor:
        """Appends a pass's tokens, and attends: query `[batch, heads, tokens, dim]`; returns `[batch, tokens, heads, dim]`."""
        self._waits = False
        cache, q_len = self.cache, query.shape[2]
        lens = cache.lens
        if rows.before is not None and rows.before != [lens[slot] for slot in self.slots]:
            raise ShapeError(
                f"the attention mask says that the rows have {rows.before} tokens, but the cache has {[lens[slot] for slot in self.slots]}; "
                "pass the mask of all tokens, padded on the left"
            )
        self._grow(max(lens[slot] for slot in self.slots) + q_len)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        piece = q_len if self._is_tokenwise and self.window is None else _PIECE
        parts = [self._piece(*(x[:, i : i + piece] for x in (q, k, v)), rows, i, options) for i in range(0, q_len, piece)]
        self.seen += q_len
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @property
    def _is_tokenwise(self) -> bool:
        """Whether no token is stored finer than another."""
        return not any(part.startswith("int4") and "-g" not in part and "-w0" not in part for part in self.format.split("/"))

    def _piece(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PaddedRows, first: int, options: Dict[str, Any]) -> torch.Tensor:
        out = self._attended(q, k, v, rows, first, options)
        self._drop()
        return out

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PaddedRows, first: int, options: Dict[str, Any]) -> torch.Tensor:
        if rows.valid is None:
            self.cache.append(k, v, sequences=self.slots)
            return self.cache.attend(q, sequences=self.slots, **options)
        valid = rows.valid[:, first : first + q.shape[1]]
        width = rows.valid.shape[1]
        # Padding comes first, so a row has what lies behind it.
        counts = [min(q.shape[1], max(0, n - (width - first - q.shape[1]))) for n in rows.counts]
        chosen = [(slot, n) for slot, n in zip(self.slots, counts) if n]
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if chosen:
            slots, counts = (list(x) for x in zip(*chosen))
            self.cache.append(k[valid], v[valid], sequences=slots, tokens=counts)
            out[valid] = self.cache.attend(q[valid], sequences=slots, q_lens=counts, **options)
        return out

    def sinks_of(self, sinks: Optional[torch.Tensor]) -> Optional[List[float]]:
        """A weight's numbers, copied from the device once."""
        if sinks is None:
            return None
        version = (sinks.data_ptr(), sinks._version)
        if self._sinks[0] != version:
            self._sinks = (version, sinks.detach().float().reshape(-1).tolist())
        return self._sinks[1]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    if device.type == "cpu":
        return "cpu"
    raise UnsupportedError(f"the model runs on {device}; attn attends on the CPU and on CUDA devices")


class QuantizedCache(TransformersCache):
    """A cache whose layers of full and sliding attention are quantized: `past_key_values` for models with `attn_implementation="attn"`.

    Args:
        config: the model's.
        format: of K and V, as for `attn.Cache`: `"int8"` (about half of bf16's bytes), `"int8/int4"`, `"int4"` (about a quarter), …
        max_tokens: tokens that each row of the batch has room for; beyond it `CacheFullError`. If not given, pools grow by doubling, which copies
            them through the host: give it where lengths are known. Sliding layers hold their window, 128 tokens that can be taken back, and a piece of
            a prompt, whatever the lengths.
        page_size: tokens of a page: 16, 32, 64 or 128.
        arithmetic: `"fast"` for prompts by floats, which take two thirds of the time on a Hopper GPU; the same tokens whatever the batch and the chunks are
            promised by `"exact"` alone. As for `attn.Cache.attend`.

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
    ) -> None:
        is_fast(arithmetic)
        decoder = config.get_text_config(decoder=True)
        _check_config(decoder)
        # Refuses a format or page size at once, not in the first pass.
        Cache(format, heads=1, dim=_head_dim(decoder), max_tokens=0, pages=0, page_size=page_size, device="cpu")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ParameterError(f"max_tokens is {max_tokens!r}; allowed: a number of tokens, or None for pools that grow")
        layers = DynamicCache(config=config).layers
        of_all: Dict[str, Any] = dict(max_tokens=max_tokens, page_size=page_size, arithmetic=arithmetic)
        quantized = [
            QuantizedLayer(format, window=getattr(layer, "sliding_window", None), **of_all) if ours else layer
            for layer, ours in zip(layers, _quantizable(decoder, layers))
        ]
        if not any(isinstance(layer, QuantizedLayer) for layer in quantized):
            raise UnsupportedError(f"no layer of this model ({type(config).__name__}) has full or sliding attention, which a QuantizedCache quantizes")
        super().__init__(layers=quantized)
        self.format = format

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


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _quantizable(config: Any, layers: List[Any]) -> List[bool]:
    """Of each layer that transformers makes for a decoder's configuration: whether it has full or sliding attention and nothing else."""
    # Layers of chunked attention have the class of sliding ones, and another mask.
    kinds = getattr(config, "layer_types", None) or ["chunked_attention" if getattr(config, "attention_chunk_size", None) else None] * len(layers)
    return [type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and kind != "chunked_attention" for layer, kind in zip(layers, kinds)]


def _check_config(config: Any) -> None:
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError("this model has latent attention (MLA), whose cache is no K and V of heads; use transformers' own cache")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedError("layers of this model share K and V with others; use transformers' own cache")
    if _head_dim(config) not in HEAD_DIMS:
        raise UnsupportedError(f"heads of this model have {_head_dim(config)} dims; attn has {', '.join(map(str, HEAD_DIMS))}: use transformers' own cache")


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
    """The attention implementation `"attn"`: query `[batch, heads, tokens, dim]`, key and value `[batch, KV heads, tokens, dim]`.

    Returns `[batch, tokens, heads, dim]`, and no weights.
    """
    if kwargs.get("output_attentions"):
        raise UnsupportedError("attn computes no attention weights; load the model with attn_implementation=\"eager\" for output_attentions=True")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("this model adds a bias to its scores, which attn does not; use attn_implementation=\"sdpa\" with another cache")
    layer = getattr(key, "_attn_layer", None)
    if layer is None:
        waiting = getattr(_WAITING, "layer", None)
        if waiting is not None and waiting._waits:
            waiting._waits, _WAITING.layer = False, None
            raise UnsupportedError("this model changes K between its cache and its attention, so a QuantizedCache cannot serve it; use transformers' own cache")
        return _torch_attention(module, (query, key, value), attention_mask, dropout, scaling, is_causal, softcap, s_aux), None
    _WAITING.layer, layer._waits = None, False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise UnsupportedError("a QuantizedCache has no gradients; call the model under torch.no_grad()")
    if dropout:
        raise UnsupportedError(f"dropout is {dropout}; a QuantizedCache is for inference: call model.eval()")
    if sliding_window is not None and layer.window not in (None, sliding_window):
        raise UnsupportedError(f"this layer attends in a window of {sliding_window} tokens, but its configuration says {layer.window}; use transformers' own cache")
    window = sliding_window if layer.window is None else layer.window
    if isinstance(attention_mask, StepMask) and attention_mask.is_of(layer.window):
        rows = attention_mask.rows()
    elif attention_mask is None:
        rows = PaddedRows(None, query.shape[0], query.shape[2])
    else:
        raise UnsupportedError("this pass has a mask of its own (4-dimensional, packed, or with parts that see each other); attn attends under causal masks with padding on the left")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options = dict(
        scale=scaling,
        causal=bool(causal),
        softcap=softcap,
        # transformers' window counts the token itself.
        window_left=None if window is None else window - 1,
        sinks=layer.sinks_of(s_aux),
        arithmetic=layer.arithmetic,
    )
    return layer.attend(query, key, value, rows, options), None


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
    """Attention over K and V as they are: of layers whose cache is not ours."""
    query, key, value = rows
    mask = mask.dense() if isinstance(mask, StepMask) else mask
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    q_len, kv_len = query.shape[2], key.shape[2]
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=q_len > 1 and mask is None and bool(causal)
        )
        return out.transpose(1, 2).contiguous()
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


AttentionInterface.register("attn", attention)
AttentionMaskInterface.register("attn", _make_mask)
