"""K and V of one layer of full or sliding attention, in pages of this library."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
from transformers.cache_utils import CacheLayerMixin

from .._attn import HEAD_DIMS
from .._cache import Cache
from .._errors import CacheFullError, ShapeError, UnsupportedError
from .._options import is_of_latents
from .._stats import CacheStats
from ._mask import PaddedRows

# Query tokens of a piece: in formats whose newest tokens have residuals, those of one append can be queries at once, and be taken back; in sliding
# layers, a piece is what the pool holds beside a window.
_PIECE = 256
# Tokens that are dropped together at the least.
_TILE = 64
# Tokens that can be taken back from a sliding layer, as rejected drafts are: their windows are held, too.
_TAKEN_BACK = 128
# Tokens that a pool without `max_tokens` begins with room for.
_FIRST_TOKENS = 512


class QuantizedLayer(CacheLayerMixin):
    """K and V of one layer of full or sliding attention; it belongs to a `QuantizedCache`, which gives it a pass's tokens.

    They are appended in the attention that follows the cache's `update`: only there is it known which are padding. `window` is transformers'
    `sliding_window`: tokens that a token sees, itself counted; with `is_chunked`, of its own chunk of so many tokens alone. `is_shared` says that other layers attend over its K and V, too. Heads of other widths than
    attn has are stored with zeros behind them, which change no score and no output.
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
        scales: Optional[Dict[str, List[float]]] = None,
        centres: Optional[bool] = None,
        checkpoints: int = 0,
        is_chunked: bool = False,
        is_shared: bool = False,
    ) -> None:
        self.is_initialized = False
        super().__init__()
        self.format, self.max_tokens, self.page_size, self.arithmetic = format, max_tokens, page_size, arithmetic
        self.window, self.is_sliding, self.is_chunked = window, window is not None, is_chunked
        self.centres, self.checkpoints, self.is_shared = centres, checkpoints, is_shared
        # Static scales of a format that has them: `k_scales` and `v_scales`, a number for each head, or one for all.
        self._scales = scales or {}
        self.cache: Optional[Cache] = None
        # The sequence of each row of the batch.
        self.slots: List[int] = []
        # Of a shared layer, in a pass of several pieces: forks of the rows as they were before it.
        self._before: List[int] = []
        # Tokens that each row has seen in whole passes, padding included.
        self.seen = 0
        # What the pool was made for: tokens of a row that it holds, rows.
        self._room = self._rows = 0
        self._sinks: Tuple[Any, Optional[List[float]]] = (None, None)

    # What transformers asks of a layer.

    @property
    def keys(self) -> None:
        """None before the first pass. Raises UnsupportedError after it: K and V lie in pages."""
        if self.is_initialized:
            raise UnsupportedError("a model reads K and V of its cache itself (layers[…].keys), which a QuantizedCache has in pages; use transformers' own cache")

    @keys.setter
    def keys(self, x: None) -> None:
        if x is not None:
            raise UnsupportedError("a model writes K and V of its cache itself (layers[…].keys), which a QuantizedCache has in pages; use transformers' own cache")

    values = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        batch, self._heads, tokens, _ = key_states.shape
        self._dim, self._v_dim = (width_for(x.shape[-1]) for x in (key_states, value_states))
        self.slots = []
        room = self.max_tokens or max(_FIRST_TOKENS, 2 * tokens)
        if self.window is not None:
            held = self.window + _TAKEN_BACK + max(_TILE, self.page_size) + _PIECE
            room = min(held, self.max_tokens or held)
        self._make(room, batch)
        self.slots = list(range(batch))
        self.is_initialized = True

    def begin(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Looks at a pass's K and V, `[batch, heads, tokens, dim]`, before the attention appends them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.slots):
            raise ShapeError(f"the batch has {key_states.shape[0]} rows, but the cache was begun with {len(self.slots)}; use a new cache, or reset this one")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        raise UnsupportedError("a QuantizedLayer gets its tokens from a QuantizedCache, which holds all layers to one pass; make that of the model's config")

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
        self.end_pass()
        if self.cache is not None:
            for slot in self.slots:
                self.cache.free(slot)
        self.slots, self.seen, self.is_initialized = [], 0, False

    def check_crop(self, removed: int) -> None:
        """Refuses to take back more tokens of each row than a sliding layer holds windows for, or a format with a window residuals."""
        if self.cache is not None and removed:
            lens = [max(0, n - removed) for n in self.lens]
            self._check_held(lens)
            for slot, n in zip(self.slots, lens):
                self.cache._cache.check_truncate(slot, n)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens of every row: -n removes n."""
        removed = -tokens_to_remove
        if removed == 0 or self.cache is None:
            return
        self._keep([max(0, n - removed) for n in self.lens])
        self.seen -= min(removed, self.seen)

    def take_back(self, lens: List[int]) -> None:
        """Takes a pass back that failed: rows are as long again as `lens` says."""
        if self._before:
            self.slots, self._before = self._before, self.slots
            self.end_pass()
            return
        self._check_held(lens)
        self._keep(lens)

    def end_pass(self) -> None:
        """Frees what a pass has kept for the layers that share K and V, and what no window sees any more."""
        for slot in self._before:
            self.cache.free(slot)
        self._before = []
        self._drop(self.slots)

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

    @property
    def lens(self) -> List[int]:
        """Tokens of each row, padding not included."""
        if self.cache is None:
            return []
        lens = self.cache.lens
        return [lens[slot] for slot in self.slots]

    # Memory.

    def _make(self, room: int, rows: int) -> None:
        """A cache of `room` tokens for each of `rows` rows, and in it the rows that there are."""
        self.check_rows(rows)
        shape = dict(heads=self._heads, dim=self._dim, v_dim=self._v_dim, page_size=self.page_size, max_q_len=_PIECE, centres=self.centres, device=_device_name(self.device))
        # A sliding layer goes back no further than its window.
        shape.update(checkpoints=self.checkpoints if self.window is None else 0)
        shape.update({name: x if len(x) > 1 else x * self._heads for name, x in self._scales.items()})
        pages = rows * Cache(self.format, max_tokens=0, pages=0, **shape).pages_for(room)
        if self.is_shared and not (self._is_tokenwise and self.window is None):
            # One row is appended once more for the layers that share it. Rows as they were before a pass own their last page, of a sliding layer their window.
            pages += pages // rows + (rows if self.window is None else pages)
        cache = Cache(self.format, max_tokens=0, pages=pages, sequences=rows, **shape)
        for row, slot in enumerate(self.slots):
            cache.restore(row, self.cache.save(slot))
        self.slots = list(range(len(self.slots)))
        self.cache, self._room, self._rows = cache, room, rows

    def check_rows(self, rows: int) -> None:
        """Refuses a batch that becomes larger than the pool was made for, where rows cannot be copied into another."""
        if rows > self._rows and self.slots and any(self.cache.first_tokens[slot] for slot in self.slots):
            raise UnsupportedError("a sliding layer that has dropped tokens gets no more rows; begin with a batch as large as it becomes")

    def _check_room(self, counts: List[int]) -> None:
        """Refuses tokens beyond what the user has said a row gets."""
        if self.max_tokens is None:
            return
        for row, (had, added) in enumerate(zip(self.lens, counts)):
            if had + added > self.max_tokens:
                raise CacheFullError(
                    f"row {row} has {had} tokens and gets {added} more, but the cache was made with max_tokens={self.max_tokens}; "
                    "make it with a larger max_tokens, or without, so that its pools grow"
                )

    def _check_held(self, lens: List[int]) -> None:
        """Refuses lengths whose last windows have been dropped."""
        first = self.cache.first_tokens
        for slot, n in zip(self.slots, lens):
            if n and first[slot] > self._first_needed(n):
                raise ShapeError(
                    f"{self.cache.lens[slot] - n} tokens cannot be taken back from a sliding layer, which holds the windows of its newest {_TAKEN_BACK}; "
                    "reset the cache and begin again"
                )

    def _keep(self, lens: List[int]) -> None:
        for slot, n in zip(self.slots, lens):
            if n:
                self.cache.truncate(slot, n)
            else:
                self.cache.free(slot)

    def _grow(self, needed: int) -> None:
        """Room for `needed` tokens of each row, unless the user has said how many there are, or the window does."""
        if needed > self._room and self.max_tokens is None and self.window is None:
            self._make(max(needed, 2 * self._room), self._rows)

    def _first_needed(self, tokens: int) -> int:
        """The first token that queries behind `tokens` tokens see."""
        return 0 if self.window is None else max(0, tokens - self.window + 1)

    def _drop(self, slots: List[int]) -> None:
        """Frees the pages that no window sees any more, nor would if drafts were taken back."""
        if self.window is None or not slots:
            return
        lens = self.cache.lens
        for slot in slots:
            self.cache.drop_before(slot, self._first_needed(max(0, lens[slot] - _TAKEN_BACK)))

    def _rearrange(self, rows: List[int]) -> None:
        """Makes row i what row `rows[i]` was; tokens that rows have in common are shared."""
        if self.cache is None:
            return
        if len(rows) > self._rows:
            self._make(self._room, len(rows))
        new = self._forked([self.slots[row] for row in rows])
        for slot in self.slots:
            self.cache.free(slot)
        self.slots = new

    def _forked(self, sources: List[int]) -> List[int]:
        """Forks of these sequences, in sequences that no row has."""
        taken = {*self.slots, *self._before}
        free = [slot for slot in range(self.cache.sequences) if slot not in taken]
        if len(free) < len(sources):
            added, first = len(sources) - len(free), self.cache.sequences
            self.cache.add_sequences(added)
            free += range(first, first + added)
        for source, slot in zip(sources, free):
            self.cache.fork(source, slot)
        return free[: len(sources)]

    def stats(self) -> Optional[CacheStats]:
        """Pages, bytes and tokens; None before the first pass."""
        return None if self.cache is None else self.cache.stats()

    # Attention.

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PaddedRows, options: Dict[str, Any]) -> torch.Tensor:
        """Appends a pass's tokens, and attends: query `[batch, heads, tokens, dim]`; returns `[batch, tokens, heads, dim of V]`."""
        lens, tokens = self.lens, query.shape[2]
        self._check_lens(rows, lens)
        self._check_room(rows.counts)
        self._grow(max(lens) + tokens)
        q, k, v = self._stored(query, key, value)
        size = self._piece_size(tokens)
        if self.is_shared and size < tokens:
            self._before = self._forked(self.slots)
        parts = []
        for first in range(0, tokens, size):
            # Before the append, so that the last piece's queries see their windows until the pass ends.
            self._drop(self.slots)
            part = slice(first, first + size)
            of_part = rows.part(first, q[:, part].shape[1])
            self._append(k[:, part], v[:, part], of_part)
            parts.append(self._over(q[:, part], of_part, options))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out[..., : value.shape[-1]]

    def attend_again(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PaddedRows, options: Dict[str, Any]) -> torch.Tensor:
        """Attends for a layer that shares K and V with this one, which has the pass's tokens `key` and `value` already: as `attend`, with queries of all
        these tokens or of the last of them."""
        asked, tokens = query.shape[2], key.shape[2]
        self._check_lens(rows, [n - count for n, count in zip(self.lens, rows.counts)])
        q, k, v = self._stored(query, key, value)
        size = self._piece_size(tokens)
        is_in_last_piece = asked <= tokens - (tokens - 1) // size * size
        out = self._over(q, rows, options) if is_in_last_piece else self._replayed(q, k, v, options)
        return out[..., : value.shape[-1]]

    def _check_lens(self, rows: PaddedRows, lens: List[int]) -> None:
        if rows.before is not None and rows.before != lens:
            raise ShapeError(
                f"the attention mask says that the rows have {rows.before} tokens, but the cache has {lens}; pass the mask of all tokens, padded on the left"
            )

    def _stored(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> List[torch.Tensor]:
        """`[batch, tokens, heads, dim]` with the dims that are stored."""
        given = ((query, self._dim), (key, self._dim), (value, self._v_dim))
        return [torch.nn.functional.pad(x, (0, dim - x.shape[-1])).transpose(1, 2) if dim > x.shape[-1] else x.transpose(1, 2) for x, dim in given]

    def _piece_size(self, tokens: int) -> int:
        """Tokens of a pass that are appended at once."""
        return tokens if self._is_tokenwise and self.window is None else _PIECE

    @property
    def _is_tokenwise(self) -> bool:
        """Whether no token is stored finer than another."""
        return not any(part.startswith("int4") and "-g" not in part and "-w0" not in part for part in self.format.split("/"))

    def _append(self, k: torch.Tensor, v: torch.Tensor, rows: PaddedRows) -> None:
        if rows.valid is None:
            self._append_rows(k, v, sequences=self.slots)
            return
        slots, counts = self._with_tokens(rows)
        if slots:
            self._append_rows(k[rows.valid], v[rows.valid], sequences=slots, tokens=counts)

    def _append_rows(self, k: torch.Tensor, v: torch.Tensor, **places: Any) -> None:
        self.cache.append(k, None if is_of_latents(self.format) else v, **places)

    def _over(self, q: torch.Tensor, rows: PaddedRows, options: Dict[str, Any]) -> torch.Tensor:
        """Attends: the rows' newest tokens are the queries `[batch, tokens, heads, dim]`. Padding gives zeros."""
        if rows.valid is None:
            return self.cache.attend(q, sequences=self.slots, **options)
        out = q.new_zeros((*q.shape[:-1], self._v_dim))
        slots, counts = self._with_tokens(rows)
        if slots:
            out[rows.valid] = self.cache.attend(q[rows.valid], sequences=slots, q_lens=counts, **options)
        return out

    def _with_tokens(self, rows: PaddedRows) -> Tuple[List[int], List[int]]:
        chosen = [(slot, n) for slot, n in zip(self.slots, rows.counts) if n]
        return [slot for slot, _ in chosen], [n for _, n in chosen]

    def _replayed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Dict[str, Any]) -> torch.Tensor:
        """Attends piece by piece over K and V of a pass that are all appended: once more, a row after the other, behind what the row was before."""
        tokens, asked, lens = k.shape[1], q.shape[1], self.cache.lens
        out = q.new_zeros((*q.shape[:-1], self._v_dim))
        for row, (slot, before) in enumerate(zip(self.slots, self._before)):
            # Padding comes first.
            padding = tokens - (lens[slot] - lens[before])
            (scratch,) = self._forked([before])
            try:
                for first in range(padding, tokens, _PIECE):
                    end = min(first + _PIECE, tokens)
                    self._drop([scratch])
                    self._append_rows(k[row, first:end], v[row, first:end], sequences=[scratch], tokens=[end - first])
                    queries = slice(max(0, first - (tokens - asked)), end - (tokens - asked))
                    if queries.stop > queries.start:
                        n = queries.stop - queries.start
                        out[row, queries] = self.cache.attend(q[row, queries], sequences=[scratch], q_lens=[n], **options)
            finally:
                self.cache.free(scratch)
        return out

    def sinks_of(self, sinks: Optional[torch.Tensor], tokens: int) -> Optional[List[float]]:
        """A weight's numbers, in a pass of so many tokens.

        On a GPU a copy to the host waits for the work ahead. A step of few tokens takes those of the passes before, unless torch says that the weight is another: it does
        not of `weight.data`, nor of weights that were made under inference_mode, so that each sequence begins with a copy.
        """
        if sinks is None:
            return None
        version = (sinks.data_ptr(), None if sinks.is_inference() else sinks._version)
        if sinks.device.type == "cpu" or self.seen == 0 or tokens > _TILE or self._sinks[0] != version:
            self._sinks = (version, sinks.detach().float().reshape(-1).tolist())
        return self._sinks[1]


def width_for(dim: int) -> int:
    """The dims with which heads of `dim` dims are stored: the fewest that attn has, less than twice as many.

    Raises:
        UnsupportedError where there are none.
    """
    wider = [width for width in HEAD_DIMS if width >= dim]
    if not wider or wider[0] >= 2 * dim:
        raise UnsupportedError(f"heads of this model have {dim} dims; attn has {', '.join(map(str, HEAD_DIMS))}: use transformers' own cache")
    return wider[0]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    if device.type == "cpu":
        return "cpu"
    raise UnsupportedError(f"the model runs on {device}; attn attends on the CPU and on CUDA devices")
