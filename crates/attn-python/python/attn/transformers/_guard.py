"""A forward pass is one step for all layers of a cache: all quantized layers have its tokens, or none has.

transformers has no call that begins or ends a pass, so a pass ends when each quantized layer was attended once, by itself and by each layer that shares its
K and V. What does not fit is refused: a layer that comes twice, or with other K and V than its cache was given. Then, and where anything raises inside the
cache or the attention, the layers that have the pass's tokens give them back.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NoReturn, Optional, Sequence, Set, Tuple

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .._errors import AttnError, ShapeError, UnsupportedError
from ._handed import Handed

if TYPE_CHECKING:
    from ._layer import QuantizedLayer

_OWN_CACHE = "use transformers' own cache"


class PassGuard:
    """Which layers of one cache have the tokens of the pass that it is in."""

    def __init__(self, layers: Sequence[Any], quantized: Dict[int, "QuantizedLayer"], sharing: Dict[int, int], config: Any) -> None:
        """`sharing` gives, for each layer that attends over another's K and V, that other one."""
        self._layers, self._quantized, self._sharing = list(layers), quantized, sharing
        # Layers with tokens, or states of linear attention, of transformers' own, which cannot be given back in general.
        kept = [isinstance(layer, LinearAttentionCacheLayerMixin) or index not in quantized for index, layer in enumerate(layers)]
        self._others = [index for index, keeps in enumerate(kept) if keeps and index not in sharing]
        self._model, self._config_layers = type(config).__name__, getattr(config, "num_hidden_layers", None)
        # The configuration of the model whose number of layers was looked at last.
        self._checked: Any = None
        self._waiting: Optional[Handed] = None
        # The lengths of the rows of each layer that was attended in this pass, before it.
        self._before: Dict[int, List[int]] = {}
        # Of this pass: the layers' K and V that others share, and those of these others that have attended.
        self._shared: Dict[int, Handed] = {}
        self._sharers: Set[int] = set()
        self._tokens = 0
        # Whether the pass has ended, and what was attended last in it: only that can come again.
        self._ended = False
        self._last: Optional[Handed] = None
        self._broken: Optional[str] = None

    # A pass, layer by layer.

    def check_layer(self, layers: Sequence[Any], index: int) -> None:
        """Refuses a layer that the cache was not made with; `layers` are those that it has."""
        own = len(self._layers)
        if index >= own and len(layers) == own:
            self._undo(index)
            raise self._other_model(f"updates layer {index}")
        if len(layers) != own or layers[index] is not self._layers[index]:
            self._undo(index)
            raise UnsupportedError(
                f"the model ({self._model}) copies or exchanges layers of its cache (at layer {index}), which a QuantizedCache does not follow; {_OWN_CACHE}"
            )

    def hand(self, index: int, key: torch.Tensor, value: torch.Tensor) -> Handed:
        """Takes a pass's K and V of a quantized layer, for its attention alone."""
        if self._ended:
            self._begin()
        if self._waiting is not None or index in self._before:
            self._refuse_open_pass(f"layer {index} of {self._model} gets the tokens of another pass")
        self._check_whole()
        with self.undoing(index):
            if self._before and key.shape[2] != self._tokens:
                raise UnsupportedError(f"layer {index} of {self._model} gets {key.shape[2]} tokens in a pass of {self._tokens}; {_OWN_CACHE}")
            self._quantized[index].begin(key, value)
        self._tokens = key.shape[2]
        self._waiting = Handed(self, index, key, value)
        if index in self._sharing.values():
            self._shared[index] = self._waiting
        return self._waiting

    def _begin(self) -> None:
        self._before, self._shared, self._sharers, self._ended, self._last = {}, {}, set(), False, None

    def take(self, handed: Handed, key: Any, value: Any, module: torch.nn.Module) -> Tuple["QuantizedLayer", bool]:
        """The layer whose attention this is, if it is given the very K and V of the layer that waits, or of one that it shares them with; and whether it
        shares them."""
        where = f"layer {handed.index} of {self._model} ({type(module).__name__})"
        index = getattr(module, "layer_idx", None)
        shares = self._may_share(index, handed)
        if handed is not self._waiting and not shares:
            if self._ended and handed is self._last:
                self._reopen()
            raise UnsupportedError(f"{where} attends again over what it gave its cache once; attn attends a layer once a pass: {_OWN_CACHE}")
        if not handed.is_given(key, value):
            raise UnsupportedError(f"{where} attends over other K or V than it gave its cache; {_OWN_CACHE}")
        self._check_model(getattr(module, "config", None))
        layer = self._quantized[handed.index]
        self._last = handed
        if shares:
            self._sharers.add(index)
        else:
            self._waiting = None
            self._before[handed.index] = layer.lens
        return layer, shares

    def _may_share(self, index: Optional[int], handed: Handed) -> bool:
        """Whether layer `index` may attend now over what another layer has been given in this pass."""
        if self._waiting is not None or self._ended or index in self._sharers or self._sharing.get(index) != handed.index:
            return False
        return self._shared.get(handed.index) is handed

    def _check_model(self, config: Any) -> None:
        """Refuses a model of another number of layers."""
        if config is None or config is self._checked:
            return
        # Decoders of encoder-decoder models call the encoder's layers theirs.
        layers = [getattr(config.get_text_config(decoder=True), name, None) for name in ("num_hidden_layers", "decoder_layers")]
        if layers[0] is not None and self._config_layers not in layers:
            raise self._other_model(f"has {layers[0]} layers")
        self._checked = config

    def _other_model(self, does: str) -> UnsupportedError:
        return UnsupportedError(
            f"the model {does}, but the cache is for {self._model}, which has {len(self._layers)}; make a QuantizedCache of the model's own config"
        )

    def attended(self) -> None:
        """Ends the pass if each quantized layer has its tokens, and was attended by those that share them."""
        if self._last.index not in self._shared:
            self._last.drop()
        if len(self._before) == len(self._quantized) and len(self._sharers) == len(self._sharing):
            for handed in self._shared.values():
                handed.drop()
            for layer in self._quantized.values():
                layer.end_pass()
                layer.seen += self._tokens
            self._ended = True

    def _reopen(self) -> None:
        """Back to before the end of the pass, to take it back."""
        for layer in self._quantized.values():
            layer.seen -= self._tokens
        self._ended = False

    @property
    def _is_open(self) -> bool:
        return self._waiting is not None or (bool(self._before) and not self._ended)

    def check_nothing_waits(self, module: torch.nn.Module) -> None:
        """Refuses an attention over K and V of the model's own while a layer waits for its attention."""
        if self._waiting is not None:
            where = f"layer {self._waiting.index} of {self._model} ({type(module).__name__})"
            self._undo(self._waiting.index)
            raise UnsupportedError(f"{where} attends over other K and V than its cache returned; {_OWN_CACHE}")

    def refuse_reader(self, index: int, name: str, operation: str) -> NoReturn:
        """Refuses a model that reads K or V that waits for its attention."""
        self._undo(index)
        raise UnsupportedError(
            f"layer {index} of {self._model} computes with {name} ({operation}) between its cache and its attention, which a QuantizedCache does not follow; "
            f'load the model with attn_implementation="attn", or call model.set_attn_implementation("attn"). If it has that, its attention is its own code: {_OWN_CACHE}'
        )

    @contextmanager
    def undoing(self, index: int) -> Iterator[None]:
        """Takes the pass back if what runs inside raises, at this layer."""
        try:
            yield
        except BaseException:
            self._undo(index)
            raise

    # Between passes.

    def settle(self) -> None:
        """Refuses a call between passes while one is open, and takes that one back."""
        if self._is_open:
            self._refuse_open_pass("the cache is changed")
        self._check_whole()

    def undo(self) -> None:
        """Takes an open pass back."""
        if self._is_open:
            self._undo(len(self._layers))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Says that layers disagree if what runs inside, one layer after the other, raises."""
        try:
            yield
        except BaseException as error:
            self._broken = f"a change of all layers ended in one of them: {error}"
            raise

    def reset(self) -> None:
        """Forgets the pass: the layers are empty."""
        self._begin()
        self._waiting = self._broken = None

    def _refuse_open_pass(self, what: str) -> NoReturn:
        last = self._waiting.index if self._waiting is not None else max(self._before)
        self._undo(len(self._layers))
        self._check_whole()
        seen = max(layer.seen for layer in self._quantized.values())
        raise UnsupportedError(
            f"{what}, but the pass before ended at layer {last} of {len(self._layers)}: it failed, or its model does not attend each layer once a pass. "
            f"Its tokens are taken back, and the cache has {seen} again: call the model again, and if this comes back, {_OWN_CACHE}"
        )

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise ShapeError(f"layers of the cache have other tokens than others, since {self._broken}; call cache.reset() and begin again")

    def _undo(self, index: int) -> None:
        """Takes the pass back that is open and fails at layer `index`."""
        if self._ended:
            return
        before = self._before
        self._begin()
        self._waiting = None
        if all(layer.seen == 0 for layer in self._quantized.values()):
            # The first pass: transformers' own layers have nothing from before it either.
            for layer in self._layers:
                layer.reset()
            return
        # Models run their layers in order.
        touched = [other for other in self._others if other <= index]
        if touched:
            self._broken = f"a pass failed after layer {touched[-1]}, whose tokens or states are transformers' own and stay"
        for at, lens in before.items():
            try:
                self._quantized[at].take_back(lens)
            except AttnError as error:
                self._broken = f"a pass failed after layer {at}, whose new tokens cannot be taken back ({error})"
