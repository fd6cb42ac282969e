"""What stands behind the decode steps that share: the interface of both ways to do it.

Each owns its static memory and makes, for a planned step, what SGLang expects where it
keeps FlashInfer's decode wrapper: an object with `forward`. So writing KV, scales and
the reshaping of layers stay SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from sglang_taper.ops.segments import Segment

# Rows of a step that are served; a step with more is SGLang's own.
MAX_ROWS = 512

# as `decode` of the modules in `ops`
Decode = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class PlannedDecode:
    """A planned step, in the place of FlashInfer's decode wrapper.

    `num_rows` is what the plan is for, at least the rows of a query.
    """

    def __init__(self, decode: Decode, plan: Any, num_rows: int) -> None:
        self._decode, self._plan, self._num_rows = decode, plan, num_rows

    def forward(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        sm_scale: float,
        logits_soft_cap: float | None,
        **_scales: object,
    ) -> torch.Tensor:
        """Attention [B, Hq, D] of `q` [B, Hq, D]; KV scales are those of no scaling."""
        missing = self._num_rows - len(q)
        padded = pad(q, (0, 0, 0, 0, 0, missing)) if missing else q
        soft_cap = logits_soft_cap or 0.0
        out, _ = self._decode(self._plan, padded, *kv_cache, sm_scale, soft_cap)
        return out[: len(q)]


class Decoder(Protocol):
    """One way to read prefixes once."""

    name: str  # as the flag calls it
    measured_as: str  # as the file of measured constants calls it

    def usable(self, segments: Sequence[Segment], num_rows: int) -> tuple[Segment, ...]:
        """What of the tree can be read once in a step of `num_rows` rows."""

    def fits(self, segments: Sequence[Segment], seq_lens: Sequence[int]) -> bool:
        """Whether there is memory for a step with these usable segments."""

    def prepare(self, num_rows: int) -> bool:
        """Make the memory of one batch size, if such a batch can share at all."""

    def plan(
        self,
        segments: Sequence[Segment],
        seq_lens: Sequence[int],
        req_pool_indices: torch.Tensor,
        seq_lens_on_device: torch.Tensor,
        in_graph: bool,
    ) -> PlannedDecode:
        """Plan a step on the current stream. A graph's batch has a prepared size."""
