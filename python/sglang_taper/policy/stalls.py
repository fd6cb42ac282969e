"""What share of busy time is not decode steps, and how long a stall is."""

from __future__ import annotations

import math

STALL_TIME_CONSTANT_MS = 10_000.0
# The mean length follows about so many stalls.
STALLS_REMEMBERED = 32


class Stalls:
    """Exponential averages over busy time; whoever runs the loop feeds them.

    `share`: of busy time that stalls take. `mean_ms`: length of one; 0 before the
    first.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self.mean_ms = 0.0

    def record(self, duration_ms: float, is_stall: bool) -> None:
        """The engine was busy for `duration_ms`: with a prefill, or a decode step."""
        keep = math.exp(-duration_ms / STALL_TIME_CONSTANT_MS)
        self.share = keep * self.share + (1 - keep) * is_stall
        if not is_stall:
            return
        weight = 1 / STALLS_REMEMBERED if self.mean_ms else 1.0
        self.mean_ms += weight * (duration_ms - self.mean_ms)
