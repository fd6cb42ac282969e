"""Decode steps in two levels, composed of FlashInfer's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from sglang_taper.engine.attention.decoder import PlannedDecode
from sglang_taper.ops import flashinfer_decode
from sglang_taper.ops.flashinfer_levels import FlashInferShape
from sglang_taper.ops.group_slots import choose_groups, slots_for_groups
from sglang_taper.ops.segments import Segment, StepLayout


class FlashInferDecoder:
    """FlashInfer in two levels: one prefix per row, shared with the rows of one group.

    `max_tokens` bounds the KV slots that each level of a step lists.
    """

    name, measured_as = "flashinfer", "cascade 64"
    TILE_ROWS = 64

    def __init__(
        self,
        shape: FlashInferShape,
        workspace: torch.Tensor,
        req_to_token: torch.Tensor,
        *,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        self._shape, self._req_to_token = shape, req_to_token
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._memory = flashinfer_decode.SharedMemory(
            shape,
            workspace,
            max_rows=max_rows,
            max_shared_tokens=max_tokens,
            max_private_tokens=max_tokens,
        )
        self._buffers: dict[int, flashinfer_decode.FlashInferBuffers] = {}

    def usable(self, segments: Sequence[Segment], num_rows: int) -> tuple[Segment, ...]:
        """The groups that save the most, as many as there are slots for."""
        bucket = self._bucket(num_rows)
        if bucket < 2:
            return ()
        groups = choose_groups(segments, self._num_slots(bucket) - 1)
        return tuple(Segment(g.rows, 0, g.num_tokens) for g in groups)

    def fits(self, segments: Sequence[Segment], seq_lens: Sequence[int]) -> bool:
        """Whether there is memory for the lists of both levels."""
        shared = sum(s.end for s in segments)
        private = sum(seq_lens) - sum(len(s.rows) * s.end for s in segments)
        padding = self._bucket(len(seq_lens)) - len(seq_lens)
        return max(shared, private + padding) <= self._max_tokens

    def prepare(self, num_rows: int) -> bool:
        """Make the memory of one batch size, if such a batch can share at all."""
        if not 2 <= num_rows <= self._max_rows:
            return False
        if num_rows not in self._buffers:
            self._buffers[num_rows] = flashinfer_decode.FlashInferBuffers(
                self._shape,
                self._memory,
                num_rows=num_rows,
                num_slots=self._num_slots(num_rows),
            )
        return True

    def plan(
        self,
        segments: Sequence[Segment],
        seq_lens: Sequence[int],
        req_pool_indices: torch.Tensor,
        seq_lens_on_device: torch.Tensor,
        in_graph: bool,
    ) -> PlannedDecode:
        """Plan a step on the current stream; a graph's batch has one of the sizes that
        were prepared, another is padded to the next."""
        num_rows = self._bucket(len(req_pool_indices))
        self.prepare(num_rows)
        missing = num_rows - len(req_pool_indices)
        rows = pad(req_pool_indices, (0, missing)) if missing else req_pool_indices
        # a padding row reads one token, as SGLang's do: no kernel meets an empty row
        lens = (*seq_lens, *[1] * (num_rows - len(seq_lens)))
        plan = flashinfer_decode.make_plan(
            StepLayout(tuple(segments), lens),
            self._req_to_token,
            rows,
            buffers=self._buffers[num_rows],
        )
        return PlannedDecode(flashinfer_decode.decode, plan, num_rows)

    def _bucket(self, num_rows: int) -> int:
        """The batch size a step is planned as; a captured one if there is one."""
        sizes = [size for size in self._buffers if size >= num_rows]
        next_power = 1 << max(num_rows - 1, 0).bit_length()
        return min(sizes, default=min(next_power, self._max_rows))

    def _num_slots(self, num_rows: int) -> int:
        ratio = self._shape.num_q_heads // self._shape.num_kv_heads
        return slots_for_groups(num_rows, ratio, self._shape.head_dim, self.TILE_ROWS)
