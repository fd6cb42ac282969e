"""A copy of the rows of a step from the request table, at addresses that never change.

A captured graph that names KV slots through the table would read the table while it
runs; the engine may by then have given a finished request's row to another.
"""

from __future__ import annotations

import torch

from sglang_taper.kernels import two_levels as kernels

GATHER_PROGRAMS, GATHER_BLOCK = 8, 256


class TableCopy:
    """Rows of `row_tokens` slots in `memory` [N] int32, at most `max_rows`.

    `table` [rows, row_tokens] is the copy and `rows` [rows] int64 its row numbers: what
    `make_plan` takes as `req_to_token` and `req_pool_indices`.
    """

    def __init__(self, memory: torch.Tensor, row_tokens: int, max_rows: int) -> None:
        num_rows = min(max_rows, len(memory) // row_tokens)
        self.table = memory[: num_rows * row_tokens].view(num_rows, row_tokens)
        self.rows = torch.arange(num_rows, device=memory.device)
        self._row_starts = self.rows * row_tokens
        self._zeros = torch.zeros_like(self.rows, dtype=torch.int32)

    def fill(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Copy the slots of each row of the step, on the current stream.

        `req_pool_indices` and `seq_lens` [B] int64, at most as many and as long as
        there is room for.
        """
        kernels.gather_slots[(len(req_pool_indices), GATHER_PROGRAMS)](
            req_to_token,
            req_pool_indices,
            self.rows,
            self._zeros,
            self._row_starts,
            seq_lens,
            self.table,
            req_to_token.stride(0),
            BLOCK=GATHER_BLOCK,
        )
