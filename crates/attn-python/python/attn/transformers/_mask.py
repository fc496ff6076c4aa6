"""Masks of a forward pass over a quantized cache: described, and recognized as causal, sliding, padded on the left, or else refused.

transformers makes a mask for each kind of layer before the first layer runs: it asks the cache how many tokens the mask spans, and passes the answer to
the mask function of the attention implementation. `MaskTokens` is that answer where the cache is quantized, so masks for any other cache are those of
`"sdpa"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, List, NoReturn, Optional

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .._errors import ShapeError, UnsupportedError
from ._opaque import Opaque

if TYPE_CHECKING:
    from ._guard import PassGuard


class MaskTokens(int):
    """Tokens that a mask spans, from a quantized cache."""

    guard: "PassGuard"

    @staticmethod
    def of(tokens: int, guard: "PassGuard") -> "MaskTokens":
        made = MaskTokens(tokens)
        made.guard = guard
        return made


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Optional[torch.Tensor] = None,
    **options: Any,
) -> Any:
    """The mask function `"attn"`: a `StepMask` over a quantized cache, else what `"sdpa"` gets."""
    sizes = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset)
    arguments = dict(sizes, mask_function=mask_function, attention_mask=attention_mask, **options)
    return _step_mask(arguments) if isinstance(kv_length, MaskTokens) else sdpa_mask(**arguments)


@torch.compiler.disable
def _step_mask(arguments: Dict[str, Any]) -> "StepMask":
    given = arguments["attention_mask"]
    # A model inside another, given the mask that the outer one has made.
    return given if isinstance(given, StepMask) else StepMask(arguments)


class StepMask(Opaque):
    """A forward pass's mask over a quantized cache: what it hides, and as torch's attention takes it.

    A model passes it on to its attention as it got it; one that computes with it is refused.
    """

    # transformers' own prepared masks have four dims: batch, head, query token, token.
    ndim = 4
    # Of the cache that it was made for.
    guard: "PassGuard"

    def __init__(self, arguments: Dict[str, Any]) -> None:
        self._arguments, self.guard = arguments, arguments["kv_length"].guard
        self._dense: Optional[torch.Tensor] = None
        self._has_dense = False
        self._rows: Optional["PaddedRows"] = None
        self._chunked: Optional[bool] = None

    def is_of(self, window: Optional[int], is_chunked: bool) -> bool:
        """Whether it hides what comes later, what lies `window` tokens back or more, or in another chunk of so many tokens, padding, and nothing else."""
        arguments = self._arguments
        if arguments.get("use_vmap"):
            return False
        if window is None:
            return arguments["mask_function"] is causal_mask_function
        # Packed and overlaid masks of a window do not allow the skip.
        return bool(arguments.get("allow_is_causal_skip")) and arguments.get("local_size") == window and self._has_chunks(window, is_chunked) == is_chunked

    def _has_chunks(self, size: int, expected: bool) -> bool:
        """Whether, of `size` tokens in a row, one does not see the one before it: masks of chunks say no other thing about themselves than those of windows."""
        if size == 1:
            return expected
        if self._chunked is None:
            # Chunks begin behind padding, whose lengths lie on the device; windows are asked without waiting for it.
            tokens = torch.arange(1, size + 1, device=self._arguments.get("device") if expected else None)
            try:
                self._chunked = not bool(torch.as_tensor(self._arguments["mask_function"](0, 0, tokens, tokens - 1)).all())
            except RuntimeError:
                self._chunked = True
        return self._chunked

    def check_sizes(self, batch: int, q_len: int, tokens: int) -> None:
        """Refuses a mask of another pass than one of `q_len` queries for `batch` rows of `tokens` tokens."""
        sizes = tuple(int(self._arguments[name]) for name in ("batch_size", "q_length", "kv_length"))
        if sizes != (batch, q_len, tokens):
            raise ShapeError(
                f"the mask is one of {sizes[1]} queries over {sizes[2]} tokens for {sizes[0]} rows, but the layer gets {q_len} for {batch} and then has {tokens}; "
                "pass a 2-dimensional mask, of which the model makes this pass's"
            )

    def __getitem__(self, index: Any) -> "StepMask":
        """The mask of the last queries, `[:, :, -n:]`, which layers that share K and V with others may be given alone; nothing else of it is taken out."""
        every = slice(None)
        if not isinstance(index, tuple) or len(index) not in (3, 4) or any(x != every for at, x in enumerate(index) if at != 2) or not isinstance(index[2], slice):
            self.refuse("getitem")
        q_len = int(self._arguments["q_length"])
        queries = range(*index[2].indices(q_len))
        if not queries or queries != range(queries[0], q_len):
            self.refuse("getitem")
        offset = self._arguments.get("q_offset", 0) + queries[0]
        return StepMask(dict(self._arguments, q_length=len(queries), q_offset=offset))

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

    def refuse(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"this model computes with its attention mask ({operation}), so its attention is its own code and not \"attn\"; use attn_implementation=\"eager\" or "
            '"sdpa" with transformers\' own cache'
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

    def part(self, first: int, tokens: int) -> "PaddedRows":
        """The rows' tokens of a part of a pass."""
        if self.valid is None:
            return PaddedRows(None, len(self.counts), tokens)
        made = PaddedRows(None, len(self.counts), tokens)
        made.valid = self.valid[:, first : first + tokens]
        # Padding comes first, so a row has what lies behind it.
        behind = self.valid.shape[1] - first - tokens
        made.counts = [min(tokens, max(0, n - behind)) for n in self.counts]
        return made
