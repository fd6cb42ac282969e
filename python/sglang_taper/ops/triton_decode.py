"""Shared-prefix decode attention with the project's own Triton kernel.

Two launches a layer, whatever the tree: `attend_tiles`, `merge_partials`. Keys are
found through SGLang's own `req_to_token`, so nothing is gathered for a step beyond the
work list, one small copy to the device. Everything a launch bakes in is fixed at
construction: a captured CUDA graph replays with any later plan of the same buffers.
"""

from __future__ import annotations

import msgspec
import torch
import triton

from sglang_taper.errors import FieldError
from sglang_taper.kernels import shared_prefix_decode as kernels
from sglang_taper.ops.segments import StepLayout
from sglang_taper.ops.staging import StagedInts
from sglang_taper.ops.work_list import (
    LARGE_M,
    SMALL_M,
    TILE_FIELDS,
    WorkList,
    WorkListPlanner,
    capacity_for,
)

LOG2_E = 1.4426950408889634
MAX_KEY_BLOCK = 64
# Keys and values of a block fill about this much shared memory per pipeline stage.
KEY_BLOCK_BYTES = 16 * 1024
MERGE_HEADS = 8


class LaunchConfig(msgspec.Struct, frozen=True):
    """How `attend_tiles` is compiled and launched.

    `key_block` keys per step of its loop (a power of two up to 64), and as many
    programs as fit a multiprocessor with that.
    """

    key_block: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2


class AttentionShape(msgspec.Struct, frozen=True):
    """Heads and dimensions of a layer, after tensor-parallel sharding."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def check(self) -> None:
        """Raises FieldError if no kernel can be made for this shape."""
        for field in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, field) < 1:
                raise FieldError(field, getattr(self, field), "at least 1")
        if self.num_q_heads % self.num_kv_heads:
            accepted = f"a multiple of num_kv_heads={self.num_kv_heads}"
            raise FieldError("num_q_heads", self.num_q_heads, accepted)


class DecodeBuffers:
    """Static memory of one kernel geometry, shared by all its layers and batch sizes.

    `dtype` is that of queries, KV and output. `levels` bounds the depth of the tree
    (a group with one prefix is one level). `num_programs` overrides the number the
    configuration gives on the device. Owns, on `device`: the work list and the
    partial outputs. At most one step's plan is in them at a time.
    """

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        max_rows: int,
        levels: int = 4,
        config: LaunchConfig | None = None,
        num_programs: int | None = None,
    ) -> None:
        shape.check()
        self.config = config or default_config(shape, dtype)
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.num_programs = num_programs or self._all_programs()
        ratio = shape.num_q_heads // shape.num_kv_heads
        self.capacity = capacity_for(
            max_rows, ratio, shape.num_kv_heads, self.num_programs, levels
        )
        self._planner = WorkListPlanner(
            self.capacity,
            head_ratio=ratio,
            num_kv_heads=shape.num_kv_heads,
            num_programs=self.num_programs,
        )
        states = (self.capacity.partials, shape.num_q_heads)
        self.partial_out = torch.empty(
            *states, shape.v_head_dim, dtype=dtype, device=self.device
        )
        self.partial_lse = torch.empty(*states, device=self.device)
        capacity = self.capacity
        sizes = {
            "num_tiles": 1,
            "row_start": capacity.rows + 1,
            "entry_row": capacity.entries,
            "entry_slot": capacity.entries,
            # last, so that a short list is a short copy
            "tiles": capacity.tiles * TILE_FIELDS,
        }
        self.work_list = StagedInts(sizes, self.device)

    def _all_programs(self) -> int:
        if self.device.type != "cuda":
            return self.config.programs_per_sm
        properties = torch.cuda.get_device_properties(self.device)
        return self.config.programs_per_sm * int(properties.multi_processor_count)

    def fill(self, layout: StepLayout) -> None:
        """Plan a step and send the work list to the device, on the current stream.

        Raises FieldError if the layout is not valid or exceeds the capacity.
        """
        host = {k: v.numpy() for k, v in self.work_list.on_host().items()}
        host["tiles"] = host["tiles"].reshape(-1, TILE_FIELDS)
        num_tiles = self._planner.fill(layout, WorkList(**host))
        self.work_list.send("tiles", num_tiles * TILE_FIELDS)


class DecodePlan(msgspec.Struct, frozen=True):
    """What the layers of a step need; valid until the buffers are planned again."""

    buffers: DecodeBuffers
    num_rows: int
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor


def make_plan(
    layout: StepLayout,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    *,
    buffers: DecodeBuffers,
) -> DecodePlan:
    """Plan a step: `req_to_token` [R, C] int32, `req_pool_indices` [B] int64.

    Both are read when `decode` runs, not here. `B` may exceed the rows of the layout
    (padding of a captured batch): such rows get output 0 and lse -inf. Raises
    FieldError if the layout is not valid or exceeds the capacity of the buffers.
    """
    num_rows = len(req_pool_indices)
    if not len(layout.seq_lens) <= num_rows <= buffers.capacity.rows:
        accepted = f"{len(layout.seq_lens)} to {buffers.capacity.rows} rows"
        raise FieldError("req_pool_indices", num_rows, accepted)
    if req_to_token.dtype != torch.int32 or req_to_token.stride(1) != 1:
        shown = (req_to_token.dtype, req_to_token.stride())
        raise FieldError("req_to_token", shown, "int32 with adjacent tokens")
    buffers.fill(layout)
    return DecodePlan(buffers, num_rows, req_to_token, req_pool_indices)


def decode(
    plan: DecodePlan,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the planned step in one layer.

    `q` [B, Hq, D], `k_pool` [S, Hkv, D], `v_pool` [S, Hkv, Dv]; the last dimension is
    contiguous. Returns `out` [B, Hq, Dv] in the type of `q` and `lse` [B, Hq] float32,
    natural log, both new. Raises FieldError for tensors the buffers were not made for.
    """
    _check_tensors(plan, q, k_pool, v_pool)
    shape = plan.buffers.shape
    out = q.new_empty(plan.num_rows, shape.num_q_heads, shape.v_head_dim)
    lse = q.new_empty(plan.num_rows, shape.num_q_heads, dtype=torch.float32)
    # tanh takes twice its argument
    inner_scale = (2 * scale / soft_cap if soft_cap else scale) * LOG2_E
    _attend(plan, q, k_pool, v_pool, (inner_scale, soft_cap * LOG2_E))
    _merge(plan, out, lse)
    return out, lse


def _attend(
    plan: DecodePlan,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scales: tuple[float, float],
) -> None:
    buffers, shape = plan.buffers, plan.buffers.shape
    kernels.attend_tiles[(buffers.num_programs,)](
        q,
        k_pool,
        v_pool,
        buffers.partial_out,
        buffers.partial_lse,
        plan.req_to_token,
        plan.req_pool_indices,
        *map(
            buffers.work_list.on_device,
            ("num_tiles", "tiles", "entry_row", "entry_slot"),
        ),
        *(*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2]),
        plan.req_to_token.stride(0),
        *scales,
        NUM_Q_HEADS=shape.num_q_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        V_HEAD_DIM=shape.v_head_dim,
        BLOCK_D=_block(shape.head_dim),
        BLOCK_DV=_block(shape.v_head_dim),
        SMALL_M=SMALL_M,
        LARGE_M=LARGE_M,
        BLOCK_N=buffers.config.key_block,
        TILE_FIELDS=TILE_FIELDS,
        HAS_SOFT_CAP=scales[1] > 0,
        num_warps=buffers.config.num_warps,
        num_stages=buffers.config.num_stages,
    )


def _merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor) -> None:
    buffers, shape = plan.buffers, plan.buffers.shape
    grid = (plan.num_rows, triton.cdiv(shape.num_q_heads, MERGE_HEADS))
    kernels.merge_partials[grid](
        buffers.partial_out,
        buffers.partial_lse,
        out,
        lse,
        buffers.work_list.on_device("row_start"),
        *out.stride()[:2],
        NUM_Q_HEADS=shape.num_q_heads,
        V_HEAD_DIM=shape.v_head_dim,
        BLOCK_DV=_block(shape.v_head_dim),
        BLOCK_H=MERGE_HEADS,
    )


def default_config(shape: AttentionShape, dtype: torch.dtype) -> LaunchConfig:
    """As many keys as a pipeline stage may hold."""
    row_bytes = _block(max(shape.head_dim, shape.v_head_dim)) * dtype.itemsize
    return LaunchConfig(max(16, min(MAX_KEY_BLOCK, KEY_BLOCK_BYTES // row_bytes)))


def _block(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _check_tensors(
    plan: DecodePlan, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
) -> None:
    shape = plan.buffers.shape
    kv_heads = shape.num_kv_heads
    for field, tensor, expected in (
        ("q", q, (plan.num_rows, shape.num_q_heads, shape.head_dim)),
        ("k_pool", k_pool, (len(k_pool), kv_heads, shape.head_dim)),
        ("v_pool", v_pool, (len(v_pool), kv_heads, shape.v_head_dim)),
    ):
        actual = (tuple(tensor.shape), tensor.dtype, tensor.stride(-1))
        if actual != (expected, plan.buffers.dtype, 1):
            accepted = f"{expected}, {plan.buffers.dtype}, last stride 1"
            raise FieldError(field, actual, accepted)
