"""TRIAGE: `ledger`, and in overload the choice of whom to serve."""

from __future__ import annotations

import math

from sglang_taper.policy.filling import Start, plan_within, start_of, step_kv_tokens
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.ledger import allowance_ms, allowed_budget
from sglang_taper.policy.types import AdmissionPlan, StepView

# A request that is paused advances at least once in so many steps.
MAX_PAUSE_STEPS = 64


class TriagePolicy:
    """`LedgerPolicy` until S0 takes longer than a request's TPOT less stalls.

    Then not everybody can be saved, and requests are paused: of each the baseline row
    runs, those with the largest allowance first, as long as the step fits the smallest
    allowance of those in it. That saves as many as can be. What time is left goes to
    the others, longest waiting first. A request is paused for at most MAX_PAUSE_STEPS
    steps; `must_run` rows always run.

    The one policy that does not advance every request in every step.
    """

    def plan(self, step: StepView) -> AdmissionPlan:
        start = start_of(step)
        tightest_ms = min(request.tpot_slo_ms for request in step.requests)
        in_time = (1 - step.stall_share) * tightest_ms >= start.baseline_ms
        if in_time or not step.model.trusted or step.waiting_ttft_share >= 1:
            return plan_within(step, allowed_budget, start=start)
        return _serve_some(step, start)


def _serve_some(step: StepView, start: Start) -> AdmissionPlan:
    filling = _Filling(step, _overdue(step, start.baseline))
    candidates = set(start.baseline).difference(filling.rows)
    allowed = [allowance_ms(request, step) for request in step.requests]
    savable = [
        (-allowed_ms, row)
        for row in candidates
        if (allowed_ms := allowed[step.request_of_row[row]]) is not None
    ]
    for negative_ms, row in sorted(savable):
        filling.add(row, -negative_ms)
    if not filling.rows:
        return AdmissionPlan(list(range(step.num_rows)), "all")
    for row in start.order:
        if row in candidates and not filling.add(row, math.inf):
            break
    rows = sorted(filling.rows)
    return AdmissionPlan(
        rows=rows,
        reason="all" if len(rows) == step.num_rows else "triage",
        baseline_ms=start.baseline_ms,
        predicted_ms=filling.step_ms(0, 0),
        budget_ms=filling.limit_ms if filling.limit_ms < math.inf else None,
    )


def _overdue(step: StepView, baseline: list[int]) -> list[int]:
    """Rows that run whatever they cost."""
    must = set(step.must_run)
    return [
        row
        for row in baseline
        if row in must or step.step - step.last_run_step[row] >= MAX_PAUSE_STEPS
    ]


class _Filling:
    """A step that grows row by row under the smallest allowance in it."""

    def __init__(self, step: StepView, rows: list[int]) -> None:
        self._step = step
        self.rows = set(rows)
        self.limit_ms = math.inf
        self._kv_tokens = step_kv_tokens(step, rows)

    def step_ms(self, more_rows: int, more_tokens: int) -> float:
        rows, tokens = len(self.rows) + more_rows, self._kv_tokens + more_tokens
        return predict_ms(self._step.model, rows, tokens)

    def add(self, row: int, allowed_ms: float) -> bool:
        """Add `row` if the step then fits `allowed_ms` and the limit so far."""
        if row in self.rows:
            return True
        limit_ms = min(self.limit_ms, allowed_ms)
        tokens = self._step.context_tokens[row]
        if self.step_ms(1, tokens) > limit_ms:
            return False
        self.rows.add(row)
        self._kv_tokens += tokens
        self.limit_ms = limit_ms
        return True
