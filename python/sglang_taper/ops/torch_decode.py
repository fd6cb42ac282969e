"""Decode attention on the CPU that reads a shared prefix once.

Rows and the query heads of one KV head are packed as the queries of that head, so a
key is loaded once for all of them; partial results are merged by log-sum-exp, in one
way for any depth of the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_taper.ops.torch_attention import attend, merge_states
from sglang_taper.ops.torch_plan import Part, TorchPlan, make_plan

__all__ = ["TorchPlan", "decode", "make_plan"]


def decode(
    plan: TorchPlan,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row over the slots of its row.

    q `[B, Hq, D]` of the plan's dtype, pools `[S, Hkv, D]` and `[S, Hkv, Dv]` of any
    (keys are read in q's). Returns out `[B, Hq, Dv]` in q's dtype, written to `out` if
    given, and natural log-sum-exp `[B, Hq]` in float32; a padding row has 0 and minus
    infinity.
    """
    results, lse = _workspace(plan, q.shape[1], v_pool.shape[2])
    for part in plan.parts:
        attend_part = _attend_shared if part.bias is None else _attend_private
        part_out, part_lse = attend_part(part, q, k_pool, v_pool, scale, soft_cap)
        results.index_copy_(0, part.positions, part_out.float())
        lse.index_copy_(0, part.positions, part_lse)
    states = (plan.num_states, plan.num_rows)
    merged, total = merge_states(results.unflatten(0, states), lse.unflatten(0, states))
    # a copy: with one state the workspace itself comes back
    if out is None:
        out = torch.empty_like(merged, dtype=q.dtype)
    return out.copy_(merged), total.clone()


def _workspace(plan: TorchPlan, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Partial results of all rows: zero and minus infinity where no part writes."""
    shape = (num_heads, head_dim)
    if shape not in plan.workspace:
        num_results = plan.num_states * plan.num_rows
        plan.workspace[shape] = (
            torch.zeros(num_results, num_heads, head_dim),
            torch.full((num_results, num_heads), -torch.inf),
        )
    return plan.workspace[shape]


def read(pool: Tensor, keys: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values `[n, Hkv, D]`; a view where the slots are consecutive."""
    # index_select: several times faster than indexing, which does not copy rows whole
    chosen = pool[keys] if isinstance(keys, slice) else pool.index_select(0, keys)
    return chosen.to(dtype)


def _attend_shared(
    part: Part, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    splits, num_rows, kv_heads = part.num_splits, len(part.rows), k_pool.shape[1]
    keys, values = (
        read(pool, part.keys, q.dtype).unflatten(0, (splits, -1)).transpose(1, 2)
        for pool in (k_pool, v_pool)
    )
    packed = q.index_select(0, part.rows).unflatten(1, (kv_heads, -1)).transpose(0, 1)
    packed = packed.flatten(1, 2).expand(splits, -1, -1, -1)
    out, lse = attend(packed, keys, values, scale, soft_cap=cap)
    out = out.unflatten(2, (num_rows, -1)).transpose(1, 2)
    lse = lse.unflatten(2, (num_rows, -1)).transpose(1, 2)
    return out.flatten(0, 1).flatten(1, 2), lse.flatten(0, 1).flatten(1, 2)


def _attend_private(
    part: Part, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    keys, values = (
        read(pool, part.keys, q.dtype)
        .unflatten(0, (len(part.rows), -1))
        .transpose(1, 2)
        for pool in (k_pool, v_pool)
    )
    packed = q.index_select(0, part.rows).unflatten(1, (k_pool.shape[1], -1))
    out, lse = attend(packed, keys, values, scale, soft_cap=cap, bias=part.bias)
    return out.flatten(1, 2), lse.flatten(1, 2)
