"""Shared-prefix decode attention composed of FlashInfer's kernels, two levels.

Level 0 reads each group's prefix once, level 1 what is private to each row, and one
kernel of ours merges. FlashInfer's own cascade wrapper is not used: on Hopper it picks
FA3, which neither packs the heads of a KV head nor splits a long prefix.

One `FlashInferBuffers` serves one batch size, as a captured graph does: every address
and launch parameter is fixed at construction, and each step only refreshes contents.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch
import triton

from sglang_taper.errors import FieldError
from sglang_taper.kernels import two_levels as kernels
from sglang_taper.ops.flashinfer_levels import (
    FlashInferShape,
    LevelArrays,
    PrivateLevel,
    SharedLevel,
)
from sglang_taper.ops.group_slots import (
    Group,
    TwoLevels,
    choose_groups,
    plan_two_levels,
)
from sglang_taper.ops.segments import StepLayout, check_layout
from sglang_taper.ops.staging import StagedInts

MERGE_HEADS = 8
GATHER_PROGRAMS, GATHER_BLOCK = 8, 256
GATHER_LISTS = ("row_of", "first_token", "first_slot", "num_tokens")


class SharedMemory:
    """What buffers of all batch sizes may share: one step is under way at a time.

    `workspace` is FlashInfer's (uint8; it advises 128 MB). `max_shared_tokens` and
    `max_private_tokens` bound the KV slots that the two levels of a step list.
    """

    def __init__(
        self,
        shape: FlashInferShape,
        workspace: torch.Tensor,
        *,
        max_rows: int,
        max_shared_tokens: int,
        max_private_tokens: int,
    ) -> None:
        self.workspace = workspace
        device = workspace.device
        states = (max_rows, shape.num_q_heads)
        self.q, self.shared_out, self.private_out = (
            torch.zeros(*states, shape.head_dim, dtype=shape.dtype, device=device)
            for _ in range(3)
        )
        self.shared_lse, self.private_lse = (
            torch.full(states, -math.inf, device=device) for _ in range(2)
        )
        self.num_shared = max_shared_tokens
        total = max_shared_tokens + max_private_tokens
        self.slots = torch.zeros(total, dtype=torch.int32, device=device)


class FlashInferBuffers:
    """Launches and static arrays for steps of exactly `num_rows` rows.

    `num_slots` group slots (the last takes rows without a group) decide the tile size
    of level 0: see `group_slots.num_slots_for`. Raises FieldError if it is not from 2
    to `num_rows`.
    """

    def __init__(
        self,
        shape: FlashInferShape,
        memory: SharedMemory,
        *,
        num_rows: int,
        num_slots: int,
    ) -> None:
        if not 2 <= num_slots <= num_rows:
            raise FieldError("num_slots", num_slots, f"2 to {num_rows}, the rows")
        self.shape, self.memory = shape, memory
        self.num_rows, self.num_slots = num_rows, num_slots
        device = memory.workspace.device
        sizes = {
            "row_order": num_rows,
            "shared_row": num_rows,
            "qo_indptr": num_slots + 1,
            "shared_indptr": num_slots + 1,
            "private_indptr": num_rows + 1,
            **dict.fromkeys(GATHER_LISTS, num_slots - 1 + num_rows),
        }
        self._arrays = StagedInts(sizes, device)
        ones = torch.ones(num_rows, dtype=torch.int32, device=device)
        on_device = self._arrays.on_device
        self._shared = SharedLevel(
            shape,
            memory.workspace,
            on_device("qo_indptr"),
            LevelArrays(
                on_device("shared_indptr"),
                memory.slots[: memory.num_shared],
                ones[:num_slots],
            ),
            num_rows,
        )
        private = LevelArrays(
            on_device("private_indptr"), memory.slots[memory.num_shared :], ones
        )
        self._private = PrivateLevel(shape, memory.workspace, private)
        self._planned: tuple[Group, ...] | None = None
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def fill(
        self,
        layout: StepLayout,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        """Plan both levels and list their KV slots, on the current stream.

        Waits only if the copies of the previous plan have not happened yet. Raises
        FieldError if the layout is not valid or has more tokens than there is memory
        for.
        """
        check_layout(layout)
        groups = choose_groups(layout.segments, self.num_slots - 1)
        levels = plan_two_levels(groups, layout.seq_lens, self.num_rows, self.num_slots)
        self._check_sizes(levels)
        if self._sent is not None:
            self._sent.synchronize()
        self._send(levels)
        self._gather(req_to_token, req_pool_indices)
        if groups != self._planned:  # a prefix does not grow
            self._shared.plan(levels)
            self._planned = groups
        self._private.plan(levels)
        if self._sent is not None:
            self._sent.record()

    def _check_sizes(self, levels: TwoLevels) -> None:
        shared, total = self.memory.num_shared, len(self.memory.slots)
        for field, needed, available in (
            ("shared tokens", levels.shared_indptr[-1], shared),
            ("private tokens", levels.private_indptr[-1], total - shared),
        ):
            if needed > available:
                accepted = f"at most {available}, the memory for their slots"
                raise FieldError(field, int(needed), accepted)

    def _send(self, levels: TwoLevels) -> None:
        shared, private = levels.shared_indptr, levels.private_indptr
        leaders = np.zeros(self.num_slots - 1, np.int32)
        leaders[: len(levels.groups)] = [group.rows[0] for group in levels.groups]
        first_slots = [shared[:-2], private[:-1] + self.memory.num_shared]
        arrays = {
            "row_order": levels.row_order,
            "shared_row": levels.shared_row,
            "qo_indptr": levels.qo_indptr,
            "shared_indptr": shared,
            "private_indptr": private,
            "row_of": np.concatenate([leaders, np.arange(self.num_rows)]),
            "first_token": np.concatenate([leaders * 0, levels.private_start]),
            "first_slot": np.concatenate(first_slots),
            "num_tokens": np.concatenate([np.diff(shared)[:-1], np.diff(private)]),
        }
        for name, host in self._arrays.on_host().items():
            host.numpy()[:] = arrays[name]
        self._arrays.send()

    def _gather(
        self, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> None:
        lists = [self._arrays.on_device(name) for name in GATHER_LISTS]
        kernels.gather_slots[(len(lists[0]), GATHER_PROGRAMS)](
            req_to_token,
            req_pool_indices,
            *lists,
            self.memory.slots,
            req_to_token.stride(0),
            BLOCK=GATHER_BLOCK,
        )

    def run(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned step in one layer; see `decode`."""
        rows, memory = slice(self.num_rows), self.memory
        pools = (k_pool.unsqueeze(1), v_pool.unsqueeze(1))
        ordered = memory.q[rows]
        torch.index_select(q, 0, self._arrays.on_device("row_order"), out=ordered)
        shared = (memory.shared_out[rows], memory.shared_lse[rows])
        private = (memory.private_out[rows], memory.private_lse[rows])
        self._shared.run(ordered, pools, scale, *shared)
        self._private.run(q, pools, scale, *private)
        return self._merge(q)

    def _merge(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, memory = self.shape, self.memory
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        grid = (self.num_rows, triton.cdiv(shape.num_q_heads, MERGE_HEADS))
        kernels.merge_levels[grid](
            memory.shared_out,
            memory.shared_lse,
            memory.private_out,
            memory.private_lse,
            self._arrays.on_device("shared_row"),
            out,
            lse,
            NUM_Q_HEADS=shape.num_q_heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_D=triton.next_power_of_2(shape.head_dim),
            BLOCK_H=MERGE_HEADS,
        )
        return out, lse


class FlashInferPlan(msgspec.Struct, frozen=True):
    """What the layers of a step need; valid until the buffers are planned again."""

    buffers: FlashInferBuffers


def make_plan(
    layout: StepLayout,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    *,
    buffers: FlashInferBuffers,
) -> FlashInferPlan:
    """Plan a step: `req_to_token` [R, C] int32, `req_pool_indices` [B] int64.

    Both are read now, on the current stream. `B` is the number of rows the buffers are
    for; rows beyond the layout get output 0 and lse -inf. Raises FieldError if the
    layout is not valid or exceeds the buffers.
    """
    if not len(layout.seq_lens) <= len(req_pool_indices) == buffers.num_rows:
        accepted = f"{buffers.num_rows} rows, at least those of the layout"
        raise FieldError("req_pool_indices", len(req_pool_indices), accepted)
    buffers.fill(layout, req_to_token, req_pool_indices)
    return FlashInferPlan(buffers)


def decode(
    plan: FlashInferPlan,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the planned step in one layer.

    `q` [B, Hq, D], pools [S, Hkv, D], 16-bit. Returns `out` [B, Hq, D] in the type of
    `q` and `lse` [B, Hq] float32, natural log, both new. Raises FieldError for another
    soft cap than the buffers were compiled for.
    """
    if soft_cap != plan.buffers.shape.soft_cap:
        accepted = f"{plan.buffers.shape.soft_cap}, that of the plan"
        raise FieldError("soft_cap", soft_cap, accepted)
    return plan.buffers.run(q, k_pool, v_pool, scale)
