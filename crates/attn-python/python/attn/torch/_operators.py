"""A plan's launches as operators of torch, which `torch.compile` and graphs of models keep as they are."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from .._errors import ParameterError
from ._plan import _PLANS, Plan, Rotary, _arguments, _check_queries


def _plan(number: int) -> Plan:
    plan = _PLANS.get(number)
    if plan is None:
        raise ParameterError(f"there is no plan {number}; it was closed")
    return plan


def _room_for_results(q: torch.Tensor, v_dim: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The results, of q's type, and log-sum-exps; not yet written."""
    _check_queries(q)
    return q.new_empty((*q.shape[:2], v_dim)), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


@torch.library.custom_op("attn::append_slots", mutates_args=("pool",))
def append_slots(
    plan: int,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    pool: torch.Tensor,
    slots: torch.Tensor,
    residual_pages: Optional[torch.Tensor],
) -> None:
    """`Plan.append_slots` as an operator, which takes the plan's number."""
    _plan(plan).append_slots_now(k, v, pool, slots, residual_pages)


@torch.library.custom_op("attn::append_slots_rotary", mutates_args=("pool", "q"))
def append_slots_rotary(
    plan: int,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    pool: torch.Tensor,
    slots: torch.Tensor,
    residual_pages: Optional[torch.Tensor],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    q: Optional[torch.Tensor],
    interleaved: bool,
) -> None:
    """`Plan.append_slots` with rotary positions as an operator; q is rotated in place."""
    _plan(plan).append_slots_now(k, v, pool, slots, residual_pages, Rotary(cos_sin, positions, q, interleaved))


@torch.library.custom_op("attn::attend", mutates_args=())
def attend(
    plan: int,
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    residual_pages: Optional[torch.Tensor],
    v_dim: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`Plan.attend` as an operator, which takes the plan's number, and its v_dim."""
    own = _plan(plan)
    out, lse = _room_for_results(q, v_dim)
    own._plan.attend(own._pages(pool, page_table, kv_lens, residual_pages), own._arrays(q, out, lse), own._stream())
    return out, lse


@torch.library.custom_op("attn::attend_rows", mutates_args=())
def attend_rows(
    plan: int,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    v_dim: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`Plan.attend_rows` as an operator, which takes the plan's number, and its v_dim."""
    own = _plan(plan)
    out, lse = _room_for_results(q, v_dim)
    # DLPack has no name for fp8, and int8 codes are bytes.
    k_cache, v_cache = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (k_cache, v_cache))
    rows = _arguments(k=k_cache, v=v_cache, page_table=page_table, kv_lens=kv_lens, k_scales=own._k_scales, v_scales=own._v_scales)
    own._plan.attend_rows(rows, own._arrays(q, out, lse), own._stream())
    return out, lse


@torch.library.custom_op("attn::step", mutates_args=("pool",))
def step(
    plan: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    pool: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    residual_pages: Optional[torch.Tensor],
    v_dim: int,
) -> torch.Tensor:
    """`Plan.step` as an operator, which takes the plan's number, and its v_dim."""
    own = _plan(plan)
    return own._step(q, k, v, own._pages(pool, page_table, kv_lens, residual_pages))


@torch.library.custom_op("attn::step_rotary", mutates_args=("pool", "q"))
def step_rotary(
    plan: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    pool: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    residual_pages: Optional[torch.Tensor],
    cos_sin: torch.Tensor,
    positions: Optional[torch.Tensor],
    interleaved: bool,
    v_dim: int,
) -> torch.Tensor:
    """`Plan.step` with rotary positions as an operator; q is rotated in place."""
    own = _plan(plan)
    pages = own._pages(pool, page_table, kv_lens, residual_pages)
    return own._step(q, k, v, pages, Rotary(cos_sin, positions, interleaved=interleaved))


# What torch.compile needs of them: results without a launch.
for _operator in (attend, attend_rows):
    _operator.register_fake(lambda plan, q, *others: _room_for_results(q, others[-1]))
for _operator in (step, step_rotary):
    _operator.register_fake(lambda plan, q, *others: q.new_empty((*q.shape[:-1], others[-1])))
