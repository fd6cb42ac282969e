"""The two attention launches of the FlashInfer composition, each with a fixed shape.

Both are planned on the host at every step (microseconds) and captured once. Their
index arrays are memory of the caller, which refreshes it; so after the first plan,
made through FlashInfer's public `plan`, nothing is copied back from the device and
nothing is allocated. Written for FlashInfer 0.7.2.

Log-sum-exps are in base 2. A row without keys gets output 0 and -inf.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flashinfer
import msgspec
import numpy as np
import torch
from flashinfer.decode import fast_decode_plan

from sglang_taper.ops.group_slots import TwoLevels, plan_two_levels

# Ratio of query to KV heads from which SGLang decodes on the tensor cores.
TENSOR_CORE_RATIO = 4
INT_WORKSPACE_BYTES = 1 << 20
PAGE_SIZE = 1  # tokens: whatever SGLang's page size, its index arrays are of slots
WHOLE_CONTEXT = -1  # no sliding window


class FlashInferShape(msgspec.Struct, frozen=True):
    """A layer after tensor-parallel sharding; keys and values of one 16-bit type.

    The soft cap is compiled in, so it belongs to the shape.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    soft_cap: float = 0.0

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.num_q_heads, self.num_kv_heads, self.head_dim

    @property
    def plan_options(self) -> dict[str, Any]:
        return {
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }

    def run_options(self, scale: float) -> dict[str, Any]:
        """FlashInfer's scale is 1 / sqrt(head_dim); what it is to be comes on top."""
        return {"q_scale": scale * math.sqrt(self.head_dim), "return_lse": True}


class LevelArrays(NamedTuple):
    """Static int32 device arrays that a launch reads."""

    indptr: torch.Tensor
    slots: torch.Tensor
    last_page_len: torch.Tensor  # ones: a page is a token


class _Level:
    """A planned wrapper of FlashInfer."""

    _shape: FlashInferShape
    _wrapper: Any

    def run(
        self,
        q: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """`q`, `out`, `lse` in the order of the level; pools [S, 1, Hkv, D]."""
        options = self._shape.run_options(scale)
        self._wrapper.run(q, pools, out=out, lse=lse, **options)


class SharedLevel(_Level):
    """Attention of each group slot's rows over its prefix: paged prefill, `fa2`.

    Its order of rows is by slot. `qo_indptr` is a static device array, like those of
    `arrays`.
    """

    def __init__(
        self,
        shape: FlashInferShape,
        workspace: torch.Tensor,
        qo_indptr: torch.Tensor,
        arrays: LevelArrays,
        num_rows: int,
    ) -> None:
        self._shape, self._num_rows = shape, num_rows
        self._num_slots = len(arrays.last_page_len)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=qo_indptr,
            paged_kv_indptr_buf=arrays.indptr,
            paged_kv_indices_buf=arrays.slots,
            paged_kv_last_page_len_buf=arrays.last_page_len,
            # `auto` is FA3 on Hopper: no packed heads, no split of a long prefix
            backend="fa2",
        )
        _shrink_workspace(self._wrapper, workspace)
        # loads the compiled module and fixes the number of rows
        empty = plan_two_levels((), (), num_rows, self._num_slots)
        self._wrapper.plan(
            torch.from_numpy(empty.qo_indptr),
            torch.from_numpy(empty.shared_indptr),
            torch.zeros(0, dtype=torch.int32),
            torch.ones(self._num_slots, dtype=torch.int32),
            *shape.heads,
            PAGE_SIZE,
            causal=False,
            **shape.plan_options,
        )

    def plan(self, levels: TwoLevels) -> None:
        """As the wrapper's `plan`, without its copies: the arrays are the caller's."""
        wrapper: Any = self._wrapper
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            torch.from_numpy(levels.qo_indptr),
            torch.from_numpy(levels.shared_indptr),
            torch.from_numpy(np.diff(levels.shared_indptr)),
            self._num_rows,
            self._num_slots,
            self._shape.num_q_heads,
            self._shape.num_kv_heads,
            PAGE_SIZE,
            True,  # CUDA graph
            self._shape.head_dim,
            self._shape.head_dim,
            False,  # causal
            WHOLE_CONTEXT,
            -1,  # no fixed split size
            False,  # split-KV is allowed, and needed: it guards the unused blocks
            0,  # no colocated CTAs
            0,  # slots differ in their number of queries
        )


class PrivateLevel(_Level):
    """Attention of each row over its private tokens, in the order of the step: decode,
    as SGLang runs it."""

    def __init__(
        self, shape: FlashInferShape, workspace: torch.Tensor, arrays: LevelArrays
    ) -> None:
        self._shape, self._arrays = shape, arrays
        num_rows = len(arrays.last_page_len)
        ratio = shape.num_q_heads // shape.num_kv_heads
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=ratio >= TENSOR_CORE_RATIO,
            paged_kv_indptr_buffer=arrays.indptr,
            paged_kv_indices_buffer=arrays.slots,
            paged_kv_last_page_len_buffer=arrays.last_page_len,
            backend="fa2",
        )
        _shrink_workspace(self._wrapper, workspace)
        self._wrapper.plan(
            torch.arange(num_rows + 1, dtype=torch.int32),
            torch.zeros(num_rows, dtype=torch.int32),
            torch.ones(num_rows, dtype=torch.int32),
            *shape.heads,
            PAGE_SIZE,
            **shape.plan_options,
        )

    def plan(self, levels: TwoLevels) -> None:
        """Plan from host lengths; the device arrays are the caller's."""
        fast_decode_plan(
            self._wrapper,
            *self._arrays,
            *self._shape.heads,
            PAGE_SIZE,
            global_override_indptr_cpu=torch.from_numpy(levels.private_indptr),
            **self._shape.plan_options,
        )


def _shrink_workspace(wrapper: Any, workspace: torch.Tensor) -> None:
    """A wrapper comes with 8 MB of integers, of which it needs a small part."""
    integers = torch.empty(
        INT_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.device
    )
    wrapper.reset_workspace_buffer(workspace, integers)
