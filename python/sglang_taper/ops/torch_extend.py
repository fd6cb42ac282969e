"""Prefill attention on the CPU: the queries of the new tokens only.

A row's new tokens are taken in chunks. A chunk attends to what is before it without a
mask, with the query heads of a KV head packed together, and to itself with a causal
mask; the two are merged. Nothing is computed for the prefix that is already there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from sglang_taper.ops.torch_attention import attend, merge_states
from sglang_taper.ops.torch_decode import read

# Short enough that little is computed above the diagonal and then masked, long enough
# that calls are few.
CHUNK_TOKENS = 256


class ExtendRow(msgspec.Struct, frozen=True):
    """Queries `[begin, begin + num_new)` of the batch; `keys` as in a decode plan."""

    begin: int
    num_new: int
    keys: slice | Tensor


class TorchExtendPlan(msgspec.Struct, frozen=True):
    """Rows with at least one new token."""

    rows: tuple[ExtendRow, ...]


def make_extend_plan(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
) -> TorchExtendPlan:
    """Plan of a prefill step: used by every layer.

    Row b has `prefix_lens[b]` tokens in the pool and `extend_lens[b]` new ones, whose
    slots are in `req_to_token[req_pool_indices[b]]` too.
    """
    rows, begin = [], 0
    for index, prefix, num_new in zip(
        req_pool_indices.tolist(), prefix_lens, extend_lens, strict=True
    ):
        if num_new:
            slots = req_to_token[index, : prefix + num_new]
            rows.append(ExtendRow(begin, num_new, _keys(slots)))
        begin += num_new
    return TorchExtendPlan(tuple(rows))


def _keys(slots: Tensor) -> slice | Tensor:
    first = int(slots[0])
    if torch.equal(slots, torch.arange(first, first + len(slots), dtype=slots.dtype)):
        return slice(first, first + len(slots))
    return slots.long()


def extend(
    plan: TorchExtendPlan,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over their row: out `[T, Hq, Dv]` in q's dtype.

    q `[T, Hq, D]`, row after row; pools `[S, Hkv, D]` and `[S, Hkv, Dv]`, the new keys
    in them already. Written to `out` if given.
    """
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], v_pool.shape[2])
    for row in plan.rows:
        dtype = _compute_dtype(q.dtype, row.num_new)
        keys, values = (
            read(pool, row.keys, dtype).transpose(0, 1) for pool in (k_pool, v_pool)
        )
        span = slice(row.begin, row.begin + row.num_new)
        packed = (
            q[span].to(dtype).unflatten(1, (k_pool.shape[1], -1)).permute(1, 2, 0, 3)
        )
        for begin in range(0, row.num_new, CHUNK_TOKENS):
            chunk = packed[:, :, begin : begin + CHUNK_TOKENS]
            before = keys.shape[1] - row.num_new + begin
            result = _attend_chunk(chunk, keys, values, before, scale, soft_cap)
            first = row.begin + begin
            out[first : first + chunk.shape[2]] = result
    return out


def _compute_dtype(dtype: torch.dtype, num_new: int) -> torch.dtype:
    """float32 where matrix units for 16 bits are missing: there it is twice as fast."""
    if num_new > 1 and not torch.cpu._is_amx_tile_supported():
        return torch.float32
    return dtype


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, before: int, scale: float, soft_cap: float
) -> Tensor:
    """Queries `[Hkv, G, M, D]` over keys `[0, before + M)` of `[Hkv, n, D]`.

    Returns `[M, Hq, Dv]`.
    """
    heads, group, num_new, _ = q.shape
    own = slice(before, before + num_new)
    shape = (heads, group, num_new, -1)
    # the kernel reads a KV head for each of its query heads through stride 0
    own_k, own_v = k[:, None, own].expand(shape), v[:, None, own].expand(shape)
    out, lse = attend(q, own_k, own_v, scale, soft_cap=soft_cap, causal=True)
    if before:
        packed = q.flatten(1, 2)[None]
        old_out, old_lse = attend(
            packed, k[None, :, :before], v[None, :, :before], scale, soft_cap=soft_cap
        )
        out, _ = merge_states(
            torch.stack([out.float(), old_out.view(shape).float()]),
            torch.stack([lse, old_lse.reshape(heads, group, num_new)]),
        )
    return out.permute(2, 0, 1, 3).flatten(1, 2)
