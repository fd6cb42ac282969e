"""What share of busy time is not decode steps."""

from __future__ import annotations

import math

STALL_TIME_CONSTANT_MS = 10_000.0


class StallShare:
    """Exponential average over busy time; whoever runs the loop feeds it."""

    def __init__(self) -> None:
        self.value = 0.0

    def record(self, duration_ms: float, is_stall: bool) -> None:
        """The engine was busy for `duration_ms`: with a prefill, or a decode step."""
        keep = math.exp(-duration_ms / STALL_TIME_CONSTANT_MS)
        self.value = keep * self.value + (1 - keep) * is_stall
