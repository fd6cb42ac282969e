"""Attention on the CPU by our C kernel: decode over shared prefixes, and prefill.

The same as `torch_decode` and `torch_extend`, whose place it takes where it can be
compiled. Plans are made by `native_plan`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_taper.ops.native_library import (
    FLOAT_TYPES,
    Call,
    Library,
    NativeUnavailable,
    find_library,
)
from sglang_taper.ops.native_plan import NativePlan, make_extend_plan, make_plan

__all__ = ["NativePlan", "decode", "extend", "make_extend_plan", "make_plan"]


def decode(
    plan: NativePlan,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row over the slots of its row.

    q `[B, Hq, D]`, pools `[S, Hkv, D]` and `[S, Hkv, Dv]`, both of one type; types are
    float32, bfloat16 or float16. Returns out `[B, Hq, Dv]` in q's dtype, written to
    `out` if given (dense in its last dimension), and natural log-sum-exp `[B, Hq]` in
    float32; a padding row has 0 and minus infinity.
    """
    out = _room(q, v_pool) if out is None else out
    lse = torch.empty(q.shape[:2])
    attend_into(out, lse, plan, q, (k_pool, v_pool), scale, soft_cap)
    return out, lse


def extend(
    plan: NativePlan,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over their row: out `[T, Hq, Dv]` in q's dtype.

    q `[T, Hq, D]`, row after row; pools and `out` as `decode`, the new keys in the
    pools already.
    """
    out = _room(q, v_pool) if out is None else out
    attend_into(out, None, plan, q, (k_pool, v_pool), scale, soft_cap)
    return out


def _room(q: Tensor, v_pool: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_pool.shape[2])


def attend_into(
    out: Tensor,
    lse: Tensor | None,
    plan: NativePlan,
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    scale: float,
    soft_cap: float,
) -> None:
    """Write attention to `out` `[N, Hq, Dv]` and, if wanted, `lse` `[N, Hq]`."""
    q, k, v = (_dense(tensor) for tensor in (q, *pools))
    call = _prepared(plan, q, k, v)
    call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    call.out, call.lse = out.data_ptr(), None if lse is None else lse.data_ptr()
    call.q_row, call.q_head, _ = q.stride()
    call.k_slot, call.k_head, _ = k.stride()
    call.v_slot, call.v_head, _ = v.stride()
    call.out_row, call.out_head, _ = out.stride()
    call.scale, call.soft_cap = scale, soft_cap
    _library().attend(call)


def _prepared(plan: NativePlan, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """What is the same in all layers with these heads, and room for partial results."""
    shape = (q.shape[1], *k.shape[1:], v.shape[2], q.dtype, k.dtype)
    if shape not in plan.workspace:
        num_heads, kv_heads, dim, value_dim = shape[:4]
        results = (plan.num_partials, num_heads)
        partial = torch.empty(*results, value_dim), torch.empty(results)
        arrays = (plan.items, plan.rows, plan.merges, plan.partials)
        call = Call(
            lse_row=num_heads,
            table=plan.table.data_ptr(),
            num_items=len(plan.items),
            num_merges=len(plan.merges),
            q_type=FLOAT_TYPES[q.dtype],
            kv_type=FLOAT_TYPES[k.dtype],
            kv_heads=kv_heads,
            group=num_heads // kv_heads,
            dim=dim,
            value_dim=value_dim,
            num_threads=plan.num_threads,
        )
        call.items, call.rows, call.merges, call.partials = (
            array.ctypes.data for array in arrays
        )
        call.partial_out, call.partial_lse = (part.data_ptr() for part in partial)
        plan.workspace[shape] = (call, partial)
    prepared: Call = plan.workspace[shape][0]
    return prepared


def _library() -> Library:
    found = find_library()
    if isinstance(found, NativeUnavailable):
        raise found
    return found


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
