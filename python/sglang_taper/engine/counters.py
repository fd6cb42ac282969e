"""Plain counters and the record of recent steps; updated once per step."""

from __future__ import annotations

from collections import deque

import msgspec

NUM_RECENT_STEPS, NUM_RECENT_PREFILLS = 256, 64


class StepRecord(msgspec.Struct):
    """One decode step: what was decided, predicted and, later, measured."""

    step: int
    now_ms: float
    policy: str
    num_requests: int
    num_rows: int
    num_admitted: int
    kv_tokens: int
    reason: str
    predicted_ms: float | None
    baseline_ms: float | None
    budget_ms: float | None
    min_slack_ms: float | None
    measured_ms: float | None = None


class PrefillRecord(msgspec.Struct):
    """One prefill pass over `num_tokens` new tokens. `step` is the decode step before
    it."""

    step: int
    num_tokens: int
    measured_ms: float | None = None


class Counters(msgspec.Struct):
    """Totals since the server started. `num_*` are counts, `*_ms` milliseconds.

    `reasons` counts steps by the constraint that bound them. `planner_ms` keeps the
    time of recent plans, building the view included.
    """

    num_steps: int = 0
    num_deferring_steps: int = 0
    num_rows_admitted: int = 0
    num_rows_deferred: int = 0
    num_branches: int = 0
    num_prefix_shared_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_evicted_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_copied_tokens: int = 0
    num_rows_aliased: int = 0
    num_alias_fallbacks: int = 0
    num_checkpoints: int = 0
    num_siblings_held: int = 0
    num_groups_held: int = 0
    num_prefills_held: int = 0
    sum_prefill_held_ms: float = 0.0
    num_measured_steps: int = 0
    sum_measured_ms: float = 0.0
    sum_absolute_error: float = 0.0
    sum_predicted_ms: float = 0.0
    num_predicted_steps: int = 0
    num_requests_ended: int = 0
    num_requests_in_slo: int = 0
    num_tokens_ended: int = 0
    num_tokens_in_slo: int = 0
    reasons: dict[str, int] = {}
    recent_steps: deque[StepRecord] = msgspec.field(
        default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS)
    )
    recent_prefills: deque[PrefillRecord] = msgspec.field(
        default_factory=lambda: deque(maxlen=NUM_RECENT_PREFILLS)
    )
    planner_ms: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=1024))

    def planned(self, record: StepRecord, planner_ms: float) -> None:
        """A decode step was decided, which took `planner_ms`."""
        deferred = record.num_rows - record.num_admitted
        self.num_steps += 1
        self.num_deferring_steps += deferred > 0
        self.num_rows_admitted += record.num_admitted
        self.num_rows_deferred += deferred
        self.reasons[record.reason] = self.reasons.get(record.reason, 0) + 1
        self.recent_steps.append(record)
        self.planner_ms.append(planner_ms)

    def measured(self, record: StepRecord, step_ms: float) -> None:
        """That step took `step_ms`."""
        record.measured_ms = step_ms
        self.num_measured_steps += 1
        self.sum_measured_ms += step_ms
        if record.predicted_ms is not None:
            self.num_predicted_steps += 1
            self.sum_predicted_ms += record.predicted_ms
            self.sum_absolute_error += abs(record.predicted_ms / step_ms - 1)

    def prefilled(self, step: int, num_tokens: int) -> PrefillRecord:
        """A prefill pass begins; what it takes is still to be measured."""
        record = PrefillRecord(step, num_tokens)
        self.recent_prefills.append(record)
        return record

    @property
    def planner_p99_ms(self) -> float | None:
        if not self.planner_ms:
            return None
        ordered = sorted(self.planner_ms)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
