"""How long steps take, and what share of busy time is not decode.

Where the forward pass runs on the calling thread (CPU, or overlap scheduling off) a
step lasts from its launch to the next launch. Where it runs asynchronously under
overlap scheduling, the launch of a step returns at once and only the moments at
which results become ready tell: the step lasts from the later of its launch and the
previous result to its own result.
"""

from __future__ import annotations

import math

import msgspec

from sglang_taper.engine.counters import PrefillRecord, StepRecord
from sglang_taper.policy.stalls import Stalls


class LaunchedStep(msgspec.Struct):
    """One launched batch: `num_rows` is 0 for a prefill, which may have a record."""

    launched_ms: float
    num_rows: int
    kv_tokens: int
    record: StepRecord | None = None
    prefill: PrefillRecord | None = None


class MeasuredStep(msgspec.Struct, frozen=True):
    """A finished decode step and how long it took."""

    num_rows: int
    kv_tokens: int
    step_ms: float
    record: StepRecord | None


class StepTimer:
    """Turns launches and results into step durations; owns no clock."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.stalls = Stalls()
        self._open: LaunchedStep | None = None
        self._last_result_ms = -math.inf

    def launched(self, step: LaunchedStep, after_idle: bool) -> MeasuredStep | None:
        """A batch is about to be launched; returns the step this launch closes."""
        closed = None
        if not self.asynchronous and self._open is not None and not after_idle:
            closed = self._close(self._open, step.launched_ms - self._open.launched_ms)
        self._open = step
        return closed

    def result_ready(self, step: LaunchedStep, now_ms: float) -> MeasuredStep | None:
        """The results of `step` have arrived; returns its measurement if this tells."""
        if not self.asynchronous:
            return None
        begin = max(step.launched_ms, self._last_result_ms)
        self._last_result_ms = now_ms
        return self._close(step, now_ms - begin)

    def forget_open_step(self) -> None:
        """Nothing ran after the open step: its end was not seen."""
        self._open = None

    def _close(self, step: LaunchedStep, step_ms: float) -> MeasuredStep | None:
        if step_ms <= 0:
            return None
        is_prefill = step.num_rows == 0
        self.stalls.record(step_ms, is_prefill)
        if is_prefill:
            if step.prefill is not None:
                step.prefill.measured_ms = step_ms
            return None
        return MeasuredStep(step.num_rows, step.kv_tokens, step_ms, step.record)
