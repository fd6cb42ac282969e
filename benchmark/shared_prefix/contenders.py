"""The ways to attend that are compared, each made for a number of rows and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sglang_taper.ops.segments import StepLayout
from sglang_taper.ops.triton_decode import AttentionShape, DecodeBuffers, LaunchConfig
from sglang_taper.ops.triton_decode import decode as triton_decode
from sglang_taper.ops.triton_decode import make_plan as triton_plan
from shared_prefix.steps import Heads, Step

WORKSPACE_BYTES = 128 << 20
LAUNCH_SHAPES = [
    LaunchConfig(64, 4, 3, 2),
    LaunchConfig(32, 4, 3, 2),
    LaunchConfig(64, 4, 2, 2),
    LaunchConfig(64, 8, 3, 1),
    LaunchConfig(128, 8, 2, 1),
]


class Contender(Protocol):
    """One way to attend; `plan` per step, `run` per layer."""

    def plan(self, step: Step) -> None: ...

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor: ...


# What a contender is made for: heads, type, rows and the most tokens of a step.
Maker = Callable[[Heads, torch.dtype, torch.device, int, int], Contender]


class TritonContender:
    """Our kernel; without `shares` every row reads its whole context."""

    def __init__(
        self,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        *,
        shares: bool = True,
        config: LaunchConfig | None = None,
    ) -> None:
        shape = AttentionShape(heads.num_q, heads.num_kv, heads.dim, heads.dim)
        self._buffers = DecodeBuffers(
            shape, dtype, device, max_rows=rows, config=config
        )
        self._shares, self._scale = shares, heads.scale
        self._plan: Any = None

    def plan(self, step: Step) -> None:
        segments = step.layout.segments if self._shares else ()
        layout = StepLayout(segments, step.layout.seq_lens)
        self._plan = triton_plan(
            layout, step.req_to_token, step.req_pool_indices, buffers=self._buffers
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return triton_decode(self._plan, q, k, v, self._scale)[0]


class CascadeContender:
    """FlashInfer composed in two levels, with group slots for tiles of `tile` rows."""

    def __init__(
        self,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        tokens: int,
        *,
        tile: int,
    ) -> None:
        from sglang_taper.ops import flashinfer_decode, flashinfer_levels
        from sglang_taper.ops.group_slots import num_slots_for

        self._ops, self._scale = flashinfer_decode, heads.scale
        shape = flashinfer_levels.FlashInferShape(*heads, dtype)
        memory = flashinfer_decode.SharedMemory(
            shape,
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            max_rows=rows,
            max_shared_tokens=tokens,
            max_private_tokens=tokens,
        )
        slots = num_slots_for(rows, heads.num_q // heads.num_kv, tile)
        self._buffers = flashinfer_decode.FlashInferBuffers(
            shape, memory, num_rows=rows, num_slots=slots
        )
        self._plan: Any = None

    def plan(self, step: Step) -> None:
        self._plan = self._ops.make_plan(
            step.layout, step.req_to_token, step.req_pool_indices, buffers=self._buffers
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._ops.decode(self._plan, q, k, v, self._scale)[0]


class PlainContender:
    """FlashInfer's decode over whole contexts, as SGLang calls it."""

    def __init__(
        self,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        tokens: int,
        *,
        backend: str,
    ) -> None:
        import flashinfer

        self._heads, self._dtype = heads, dtype
        ints = {"dtype": torch.int32, "device": device}
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=heads.num_q // heads.num_kv >= 4,
            paged_kv_indptr_buffer=torch.zeros(rows + 1, **ints),
            paged_kv_indices_buffer=torch.zeros(tokens, **ints),
            paged_kv_last_page_len_buffer=torch.ones(rows, **ints),
            backend=backend,
        )

    def plan(self, step: Step) -> None:
        lens = torch.tensor(step.layout.seq_lens, dtype=torch.int32)
        indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
        indptr[1:] = lens.cumsum(0)
        self._wrapper.plan(
            indptr,
            torch.cat([step.slots(row) for row in range(step.rows)]),
            torch.ones(len(lens), dtype=torch.int32),
            *self._heads,
            1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)))


def triton(shares: bool = True, config: LaunchConfig | None = None) -> Maker:
    def make(heads: Heads, dtype: torch.dtype, device: torch.device, *size: int) -> Any:
        return TritonContender(
            heads, dtype, device, size[0], shares=shares, config=config
        )

    return make


def cascade(tile: int) -> Maker:
    return lambda *made_for: CascadeContender(*made_for, tile=tile)


def plain(backend: str) -> Maker:
    return lambda *made_for: PlainContender(*made_for, backend=backend)


PLAIN = {"plain fa2": plain("fa2"), "plain fa3": plain("fa3")}
PLAIN["plain triton"] = triton(shares=False)
SHARED = {
    "cascade 64": cascade(64),
    "cascade 128": cascade(128),
    "triton": triton(),
}
