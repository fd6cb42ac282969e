"""The step clock: what time it is, agreed by all tensor-parallel ranks.

With one rank it is the monotonic clock. With several, each rank would read another
time and plan another batch, and the next collective would hang; so the leader sends
a `TaperTick` with the ordinary request broadcast (docs/adr/0003) and every rank, the
leader too, plans with what the last tick said. A lost tick only makes time stand
still for one iteration.
"""

from __future__ import annotations

import time

import msgspec

from sglang_taper.policy.types import LatencyCoefficients


def monotonic_ms() -> float:
    """Milliseconds on the clock SGLang stamps requests with (`perf_counter`)."""
    return time.perf_counter() * 1000.0


class TaperTick(msgspec.Struct, frozen=True):
    """What the leader measured: sent to all ranks, itself included."""

    now_ms: float
    model: LatencyCoefficients
    stall_share: float
    mean_stall_ms: float = 0.0


class StepClock:
    """Holds the tick in force."""

    def __init__(self, num_ranks: int) -> None:
        self.shared = num_ranks > 1
        self._tick = TaperTick(monotonic_ms(), LatencyCoefficients(), 0.0)

    def accept(self, tick: TaperTick) -> None:
        self._tick = tick

    @property
    def now_ms(self) -> float:
        return self._tick.now_ms if self.shared else monotonic_ms()

    @property
    def tick(self) -> TaperTick:
        return self._tick
