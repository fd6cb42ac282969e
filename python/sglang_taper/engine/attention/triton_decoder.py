"""Decode steps over a tree of prefixes, with our Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_taper.engine.attention.decoder import PlannedDecode
from sglang_taper.engine.attention.gate import parents_first
from sglang_taper.ops import triton_decode
from sglang_taper.ops.segments import Segment, StepLayout
from sglang_taper.ops.table_copy import TableCopy
from sglang_taper.ops.triton_decode import AttentionShape, DecodeBuffers

TREE_LEVELS = 4


class TritonDecoder:
    """Our kernel: a tree of up to `TREE_LEVELS` levels.

    It finds KV slots through a request table in every layer: SGLang's own, or in a
    captured graph a copy made before each replay.
    """

    name, measured_as = "triton", "triton"

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        req_to_token: torch.Tensor,
        *,
        max_rows: int,
    ) -> None:
        self._req_to_token, self._max_rows = req_to_token, max_rows
        self._buffers = DecodeBuffers(
            shape, dtype, req_to_token.device, max_rows=max_rows, levels=TREE_LEVELS
        )
        self._copy: TableCopy | None = None

    def use_memory(self, memory: torch.Tensor, row_tokens: int) -> None:
        """Memory for the copies that graphs read, in rows of `row_tokens`."""
        self._copy = TableCopy(memory, row_tokens, self._max_rows)

    def usable(self, segments: Sequence[Segment], num_rows: int) -> tuple[Segment, ...]:
        """The tree, without what lies below its fourth level."""
        levels = [0] * num_rows
        kept = []
        for segment in segments:
            level = 1 + levels[segment.rows[0]]
            for row in segment.rows:
                levels[row] = level
            if level <= TREE_LEVELS:
                kept.append(segment)
        return parents_first(kept)

    def fits(self, segments: Sequence[Segment], seq_lens: Sequence[int]) -> bool:
        """Whether the copy of the request table has room for the longest row."""
        return self._copy is None or max(seq_lens) <= self._copy.table.shape[1]

    def prepare(self, num_rows: int) -> bool:
        """One memory serves all batch sizes."""
        room = self._max_rows if self._copy is None else len(self._copy.table)
        return 2 <= num_rows <= room

    def plan(
        self,
        segments: Sequence[Segment],
        seq_lens: Sequence[int],
        req_pool_indices: torch.Tensor,
        seq_lens_on_device: torch.Tensor,
        in_graph: bool,
    ) -> PlannedDecode:
        """Plan a step on the current stream."""
        num_rows = len(req_pool_indices)
        table, rows = self._req_to_token, req_pool_indices
        if in_graph and self._copy is not None:
            self._copy.fill(table, rows, seq_lens_on_device)
            table, rows = self._copy.table, self._copy.rows[:num_rows]
        layout = StepLayout(tuple(segments), tuple(seq_lens))
        plan = triton_decode.make_plan(layout, table, rows, buffers=self._buffers)
        return PlannedDecode(triton_decode.decode, plan, num_rows)
