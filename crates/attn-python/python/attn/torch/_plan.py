"""Launches for a batch shape over pages that torch allocates."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import torch

from .. import _attn
from .._arrays import torch_capsule
from .._errors import ParameterError, ShapeError, UnsupportedError
from .._options import Modifiers, check_values, count, counts, flag, format_name, numbers, refusal


@dataclass
class Rotary:
    """Rotary positions (RoPE) of an append: K is rotated before it is stored, and the queries of its tokens in place, in the same launch.

    Args:
        cos_sin: `[positions, rotary_dim]`, float32, float16 or bfloat16: of a position, the cosines of its pairs, then their sines (`cos_sin_cache` of
            vLLM and SGLang). rotary_dim is a multiple of 4, up to dim; dims behind it stay.
        positions: int64 `[tokens]`. Tokens without a slot may have any; where theirs is no row of cos_sin, their queries stay. None for `Plan.step`
            alone: the tokens' numbers in their sequences, from 0.
        q: `[tokens, heads, dim]` in K's type; tokens may lie apart. `Plan.step` rotates its own.
        interleaved: dims 2i and 2i + 1 are a pair; else i and i + rotary_dim / 2.
    """

    cos_sin: torch.Tensor
    positions: Optional[torch.Tensor] = None
    q: Optional[torch.Tensor] = None
    interleaved: bool = False

    def _arguments(self, q: Optional[torch.Tensor]) -> SimpleNamespace:
        return _arguments(cos_sin=self.cos_sin, positions=self.positions, q=q, interleaved=bool(self.interleaved))


@dataclass
class Centres:
    """Where an append's tokens find the centres of K of their sequences, for a plan with `centres=True`.

    Args:
        first_pages: int32 `[tokens]`: the page that holds the first tokens of each token's sequence.
        positions: int32 `[tokens]`: each token's number in its sequence.
        one_each: no sequence brings two tokens, which then take one launch in place of four.
    """

    first_pages: torch.Tensor
    positions: torch.Tensor
    one_each: bool = False


def _capsule(tensor: Optional[torch.Tensor]) -> Any:
    return None if tensor is None else torch_capsule("a tensor of a plan", tensor)


def _arguments(**given: Any) -> SimpleNamespace:
    """What the extension takes, attribute by attribute: tensors as capsules. Its names are those of the extension's struct, which a test compares."""
    return SimpleNamespace(**{name: _capsule(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()})


def _check_queries(q: torch.Tensor) -> None:
    if q.dim() != 3:
        raise ShapeError(f"q has the shape {list(q.shape)}; needed: [query tokens, heads, dim]")


# Custom operators take numbers and tensors alone: a plan is passed by its number.
_PLANS: Dict[int, "Plan"] = {}
_NUMBERS = itertools.count(1)


class Scratch:
    """Memory in which launches leave nothing for the next one: plans share it whose launches follow one another on one stream, such as those of a model's batch shapes.

    It is as large as its largest plan needs, where plans' own would add up. A plan keeps what it was made with, and a larger one gets new memory: make the largest first.
    """

    def __init__(self) -> None:
        self._memory: Optional[torch.Tensor] = None

    @property
    def bytes(self) -> int:
        """Its size now."""
        return 0 if self._memory is None else self._memory.numel()

    def _at_least(self, needed: int, device: torch.device) -> torch.Tensor:
        memory = self._memory
        if memory is not None and memory.device != device:
            raise ParameterError(f"scratch lies on {memory.device}, and the plan on {device}; make one for each device")
        if memory is None or memory.numel() < needed:
            memory = self._memory = torch.empty(needed, dtype=torch.uint8, device=device)
        return memory


class Plan:
    """Launches for a batch shape: one number of query tokens for each sequence, lengths up to `max_kv_len`.

    A plan's workspace serves one launch at a time: use it on one stream, or one plan for each stream. Torch's current device may be another. Results do not depend on the plan. A workspace grows with the number of
    sequences times `max_kv_len` (about 1.5 % of that many tokens in `"int8"`); plans of many batch shapes share one `Scratch`.

    Args:
        format: what pages hold, as for `attn.Cache`.
        heads, kv_heads, dim: query heads, KV heads, dims of a head.
        v_dim: dims of a value and of a result, where they are not those of a key and a query.
        q_lens: query tokens of each sequence; a step's rows are sequence after sequence.
        max_kv_len: the longest length that a step may have, up to 1048576.
        page_size: tokens of a page: 16, 32, 64 or 128.
        rows: the plan is for `attend_rows`.
        rotary: `append_slots` and `step` take rotary positions, whose kernel is loaded, too.
        ragged: sequences bring other numbers of query tokens from step to step, as `set_query_starts` says; `q_lens` gives their number, how many
            tokens they have in all, and the most that one mostly has, for which the kernel is chosen.
        spans: sequences are shards, for `attend_spans`; not with `rows` or `ragged`. Sinks belong to `merge_spans`.
        centres: pages have their sequences' centres of K, as `attn.Cache` keeps them for the same formats: behind the bytes of the page that holds a sequence's first tokens,
            so that they go where it goes. For `append_slots_now`, `attend` and `attend_into`, pages of 64 or 128 tokens, and keys of `"int8"` (`"int8/int4-w0"`).
        device: `"cuda"`, `"cuda:1"`, a torch.device; torch's current one if not given.
        scale, causal, softcap, window_left, chunk, alibi_slopes, sinks, arithmetic: as for `attn.Cache.attend`.
        k_scales, v_scales: static scales for `"fp8"` and `"int8-tensor"`, one for each KV head.
        scratch: memory that the plan shares with others of the same stream.

    Raises:
        ParameterError, UnsupportedError, DeviceError.
    """

    def __init__(
        self,
        format: str = "int8",
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        q_lens: Sequence[int],
        max_kv_len: int,
        v_dim: Optional[int] = None,
        page_size: int = 64,
        rows: bool = False,
        rotary: bool = False,
        ragged: bool = False,
        spans: bool = False,
        centres: bool = False,
        device: Union[None, str, torch.device] = None,
        scale: Optional[float] = None,
        causal: bool = True,
        softcap: Optional[float] = None,
        window_left: Optional[int] = None,
        chunk: Optional[int] = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        arithmetic: str = "exact",
        k_scales: Any = None,
        v_scales: Any = None,
        scratch: Optional[Scratch] = None,
    ) -> None:
        if not isinstance(scratch, (Scratch, type(None))):
            raise refusal("scratch", scratch, "an attn.torch.Scratch")
        options = _arguments(
            format=format_name(format),
            heads=count("heads", heads, 1),
            kv_heads=count("kv_heads", kv_heads, 1),
            dim=count("dim", dim, 1),
            v_dim=count("v_dim", dim if v_dim is None else v_dim, 1),
            page_size=count("page_size", page_size, 1),
            q_lens=counts("q_lens", q_lens),
            max_kv_len=count("max_kv_len", max_kv_len),
            rows=flag("rows", rows),
            rotary=flag("rotary", rotary),
            ragged=flag("ragged", ragged),
            spans=flag("spans", spans),
            centres=flag("centres", centres),
            k_scales=numbers("k_scales", k_scales),
            v_scales=numbers("v_scales", v_scales),
            modifiers=Modifiers.of(scale, causal, softcap, window_left, chunk, alibi_slopes, sinks, arithmetic),
        )
        if options.spans and (options.rows or options.ragged):
            raise ParameterError("spans=True with rows=True or ragged=True; a plan for shards is of the library's pages, and knows its q_lens")
        if options.centres and (options.rows or options.spans or options.rotary):
            raise ParameterError("centres=True with rows=True, spans=True or rotary=True; centres lie in the library's pages, and keys come rotated")
        if not hasattr(_attn, "NativePlan"):
            raise UnsupportedError('this build of the package leaves CUDA out, which `pip install ./crates/attn-python` has; attn.Cache works on the CPU')
        if not torch.cuda.is_available():
            raise UnsupportedError("torch sees no CUDA device; attn.Cache works on the CPU")
        if not isinstance(device, (str, torch.device, type(None))):
            raise refusal("device", device, 'a CUDA device, such as "cuda:1"')
        try:
            device = torch.device("cuda" if device is None else device)
        except Exception as error:
            raise refusal("device", device, 'a CUDA device, such as "cuda:1"') from error
        if device.type != "cuda":
            raise ParameterError(f"device is {device}; allowed: a CUDA device; attn.Cache works on the CPU")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._options, self.v_dim = options, options.v_dim
        with torch.cuda.device(self.device):
            self._plan = _attn.NativePlan(options, f"cuda:{index}")
            blocks, slopes = self._plan.lists()
            own = self._plan.workspace_bytes
            self._scratch = None
            if scratch is not None and self._plan.scratch_bytes > 0:
                own -= self._plan.scratch_bytes
                self._scratch = scratch._at_least(self._plan.scratch_bytes, self.device)
            self._workspace = torch.zeros(max(own, 1), dtype=torch.uint8, device=self.device)
            self._blocks = self._bytes(blocks)
            if options.ragged:  # of no tokens, until `set_query_starts` lists some
                self._blocks = torch.zeros(self._plan.query_blocks_bytes, dtype=torch.uint8, device=self.device)
            self._slopes = None if options.modifiers.alibi_slopes is None else self._bytes(slopes).view(torch.float32)
            self._sinks, self._k_scales, self._v_scales = (
                None if x is None else torch.tensor(x, dtype=torch.float32, device=self.device)
                for x in (options.modifiers.sinks, options.k_scales, options.v_scales)
            )
        self.number = next(_NUMBERS)
        _PLANS[self.number] = self

    def __reduce__(self) -> Any:
        raise UnsupportedError("a plan can be neither copied nor pickled, since its kernels and its workspace are the GPU's; make another one by the same arguments")

    def _bytes(self, data: bytes) -> Optional[torch.Tensor]:
        # From pinned memory: the copy does not wait for the work ahead in the stream, as a host that plans a step while the last one runs needs.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory().to(self.device, non_blocking=True) if data else None

    def close(self) -> None:
        """Gives the workspace back. Graphs that captured the plan must not run any more."""
        _PLANS.pop(self.number, None)

    def load_smaller(self) -> int:
        """Loads the kernels of all plans that are no larger than this one: of at most as many sequences, query tokens and KV tokens, else by the same arguments. Those that the
        package has no image of are compiled side by side, which takes seconds: an engine that calls it at its start has no such step later. Returns how many there are.

        Raises:
            DeviceError.
        """
        return self._plan.load_smaller()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: K, V and their scales, of all KV heads, and centres of K where pages have them."""
        return self._plan.page_bytes

    def residual_slots(self, q_len: int = 64) -> int:
        """Entries of a row of `residual_pages` where steps have up to `q_len` query tokens of a sequence; 0 for formats without a window."""
        return self._plan.residual_slots(count("q_len", q_len))

    @property
    def first_residual_pages(self) -> int:
        """Pages of each sequence whose residual pages are kept for good: those of its first 64 tokens. 0 for formats without a window."""
        return self._plan.first_residual_pages

    def residual_slot(self, page: Any, slots: int) -> Any:
        """Where a row of `slots` entries has the residual page of page `page` of its sequence, an int or a tensor of them: the first pages have entries of
        their own, the last ones share those behind."""
        first = self.first_residual_pages
        of_last = first + page % (slots - first)
        return torch.where(page < first, page, of_last) if isinstance(page, torch.Tensor) else page if page < first else of_last

    def new_pool(self, pages: int) -> torch.Tensor:
        """An empty pool: uint8 `[pages, page_bytes]`."""
        return torch.zeros(count("pages", pages), self.page_bytes, dtype=torch.uint8, device=self.device)

    def _pages(self, pool: torch.Tensor, page_table: Any, kv_lens: Any, residual_pages: Any) -> SimpleNamespace:
        # An append by slots needs neither table nor lengths.
        empty = None
        if page_table is None:
            empty = torch.empty((len(self._options.q_lens), 0), dtype=torch.int32, device=self.device)
        return _arguments(
            pool=pool,
            page_table=empty if page_table is None else page_table,
            kv_lens=empty if kv_lens is None else kv_lens,
            residual_pages=residual_pages,
            k_scales=self._k_scales,
            v_scales=self._v_scales,
        )

    def _arrays(self, q: torch.Tensor, out: Optional[torch.Tensor], lse: Optional[torch.Tensor]) -> SimpleNamespace:
        return _arguments(
            q=q,
            out=out,
            lse=lse,
            workspace=self._workspace,
            scratch=self._scratch,
            query_blocks=self._blocks,
            alibi_slopes=self._slopes,
            sinks=self._sinks,
        )

    def _kv(self, k: torch.Tensor, v: Optional[torch.Tensor]) -> Tuple[Any, Any]:
        """K, and V where it is no part of K, as capsules."""
        check_values(self._options.format, v)
        return _capsule(k), None if v is None else _capsule(v)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def append_slots(
        self,
        k: torch.Tensor,
        v: Optional[torch.Tensor],
        pool: torch.Tensor,
        slots: torch.Tensor,
        residual_pages: Optional[torch.Tensor] = None,
        rotary: Optional[Rotary] = None,
    ) -> None:
        """Appends tokens that bring their places: any number, of any sequences.

        Args:
            k, v: `[tokens, KV heads, dim]`, of V v_dim, float32, float16 or bfloat16; tokens may lie apart. Those of a sequence lie side by side, in order. Of
                latents v is None.
            slots: int64 `[tokens]`, page · page_size + token of the page; negative: skipped.
            residual_pages: int32 `[tokens]` for formats with a window, -1 for none, as for pages that are neither one of the first nor of the last of a sequence.
            rotary: K and queries are before RoPE, and rotated here, in 32 bits; for a plan with `rotary=True`.
        """
        if rotary is None:
            torch.ops.attn.append_slots(self.number, k, v, pool, slots, residual_pages)
            return
        if rotary.positions is None:
            raise ParameterError("rotary.positions is None; slots do not say a token's number in its sequence: pass int64 positions")
        torch.ops.attn.append_slots_rotary(
            self.number, k, v, pool, slots, residual_pages, rotary.cos_sin, rotary.positions, rotary.q, bool(rotary.interleaved)
        )

    def set_query_starts(self, cu_seqlens_q: torch.Tensor) -> None:
        """Says how many query tokens each sequence brings from now on, for a plan with `ragged=True`: one launch, once for the layers of a step, in
        a graph or outside. Sequences without query tokens cost nothing; rows of q behind the last one's are not read, nor those of the results
        written.

        Args:
            cu_seqlens_q: int32 `[sequences + 1]`: the first query token of each sequence, then the end of the last one's; at most as many as
                `q_lens` has in all. Read on the device.
        """
        self._plan.list_query_blocks(_capsule(cu_seqlens_q), _capsule(self._blocks), self._stream())

    def attend(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        residual_pages: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Attends.

        Args:
            q: `[query tokens, heads, dim]`, contiguous.
            page_table: int32 `[sequences, pages]`.
            kv_lens: int32 `[sequences]`; counts the tokens of the step.
            residual_pages: int32 `[sequences, residual_slots]` for formats with a window: that of page i at `residual_slot(i, residual_slots)`.

        Returns:
            The results, of q's type and of its shape with v_dim as the last dim, and float32 log-sum-exps `[query tokens, heads]`.
        """
        return torch.ops.attn.attend(self.number, q, pool, page_table, kv_lens, residual_pages, self.v_dim)

    def attend_spans(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        tokens_after: Optional[torch.Tensor] = None,
        residual_pages: Optional[torch.Tensor] = None,
        tokens_before: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Attends shards of the sequences, for a plan with `spans=True`: runs of whole spans of 1024 tokens, but for the last shard. What all shards
        leave, one behind the other (`torch.cat`), is what `merge_spans` gives the bits of one GPU over all tokens.

        Args:
            kv_lens: int32 `[sequences]`: tokens of this shard.
            tokens_after: int32 `[sequences]`: tokens that follow in other shards; queries are the last tokens of all. None for the last shard.
            tokens_before: int32 `[sequences]`: tokens that lie in shards ahead, multiples of 1024. None for the first shard.
            q, pool, page_table, residual_pages: as for `attend`.

        Returns:
            float32 `[spans, query tokens, heads, 2]`, maxima and sums, and `[spans, query tokens, heads, v_dim]`; as many spans as `max_kv_len` has.
        """
        _check_queries(q)
        like = dict(dtype=torch.float32, device=self.device)
        max_sums = torch.empty((self._plan.spans, *q.shape[:2], 2), **like)
        o = torch.empty((self._plan.spans, *q.shape[:2], self.v_dim), **like)
        pages = self._pages(pool, page_table, kv_lens, residual_pages)
        spans = _arguments(max_sums=max_sums, o=o, tokens_before=tokens_before, tokens_after=tokens_after)
        self._plan.attend_spans(pages, self._arrays(q, None, None), spans, self._stream())
        return max_sums, o

    def attend_rows(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Attends the pages of another engine in place, with the bits of a contiguous cache of the same rows.

        Args:
            q: `[query tokens, heads, dim]`, contiguous, float32, float16 or bfloat16.
            k_cache, v_cache: `[pages, page_size, KV heads, dim]`, of V v_dim, of bfloat16 ("bf16"), float16 ("f16"), float8_e4m3fn or uint8 ("fp8"), int8
                ("int8-tensor"). Strides are free but between dims, and multiples of 16 bytes: for `[pages, KV heads, page_size, dim]` pass
                `cache.transpose(1, 2)`, and for vLLM's tensor of K and V `cache[0]`, `cache[1]`.
            page_table: int32 `[sequences, pages]`.
            kv_lens: int32 `[sequences]`; counts the tokens of the step.

        Returns:
            The results, of q's type and of its shape with v_dim as the last dim, and float32 log-sum-exps `[query tokens, heads]`.
        """
        return torch.ops.attn.attend_rows(self.number, q, k_cache, v_cache, page_table, kv_lens, self.v_dim)

    def export(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        row_starts: torch.Tensor,
        max_tokens: int,
        first_tokens: Optional[torch.Tensor] = None,
        residual_pages: Optional[torch.Tensor] = None,
    ) -> None:
        """Writes a range of tokens of each sequence as rows, as they were before they were quantized but for its error: for kernels that read no pages.

        Args:
            k, v: `[tokens, KV heads, dim]`, of V v_dim, float32, float16 or bfloat16: the ranges, one behind the other; tokens may lie apart.
            row_starts: int32 `[sequences + 1]`: where each range begins in k and v, then where the last one ends.
            max_tokens: no range is longer.
            first_tokens: int32 `[sequences]`: the first token of each range; 0 if not given.
            pool, page_table, kv_lens, residual_pages: as for `attend`; the newest tokens are read as finely as a query at the end would.
        """
        rows = _arguments(k=k, v=v, row_starts=row_starts, first_tokens=first_tokens, max_tokens=count("max_tokens", max_tokens))
        self._plan.export(self._pages(pool, page_table, kv_lens, residual_pages), rows, self._stream())

    def append_slots_now(
        self,
        k: torch.Tensor,
        v: Optional[torch.Tensor],
        pool: torch.Tensor,
        slots: torch.Tensor,
        residual_pages: Optional[torch.Tensor] = None,
        rotary: Optional[Rotary] = None,
        centres: Optional[Centres] = None,
    ) -> None:
        """`append_slots` without an operator, for hosts that have one around this call; with `centres` for a plan with `centres=True`."""
        pages = self._pages(pool, None, None, residual_pages)
        rotary = None if rotary is None else rotary._arguments(rotary.q)
        of = None if centres is None else _arguments(first_pages=centres.first_pages, positions=centres.positions, one_each=flag("one_each", centres.one_each))
        self._plan.append_slots(pages, self._kv(k, v), _capsule(slots), self._stream(), rotary, of)

    def attend_into(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        pool: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        residual_pages: Optional[torch.Tensor] = None,
    ) -> None:
        """`attend` without log-sum-exps into `out`, of q's type and of its shape with v_dim as the last dim, for hosts that own the output and the operator around this call."""
        self._plan.attend(self._pages(pool, page_table, kv_lens, residual_pages), self._arrays(q, out, None), self._stream())

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: Optional[torch.Tensor],
        pool: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        residual_pages: Optional[torch.Tensor] = None,
        rotary: Optional[Rotary] = None,
    ) -> torch.Tensor:
        """Appends as many tokens to each sequence, and attends; faster than one after the other. `kv_lens` counts the new tokens already.

        Args:
            rotary: K and q are before RoPE, and rotated here, in 32 bits, q in place; its own q stays None. For a plan with `rotary=True`.

        Returns:
            The results, of q's type and of its shape with v_dim as the last dim.
        """
        if rotary is None:
            return torch.ops.attn.step(self.number, q, k, v, pool, page_table, kv_lens, residual_pages, self.v_dim)
        if rotary.q is not None:
            raise ParameterError("rotary.q is given; a step rotates the queries that it attends: leave it None")
        return torch.ops.attn.step_rotary(
            self.number, q, k, v, pool, page_table, kv_lens, residual_pages, rotary.cos_sin, rotary.positions, bool(rotary.interleaved), self.v_dim
        )

    def _step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: Optional[torch.Tensor],
        pages: SimpleNamespace,
        rotary: Optional[Rotary] = None,
    ) -> torch.Tensor:
        out = q.new_empty((*q.shape[:-1], self.v_dim))
        rotary = None if rotary is None else rotary._arguments(q)
        self._plan.step(pages, self._arrays(q, out, None), self._kv(k, v), self._stream(), rotary)
        return out
