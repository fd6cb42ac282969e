"""Policies with a part taken out, to see what the part is worth."""

from __future__ import annotations

from collections import Counter

from sglang_taper.policy.admission import AdmissionPolicy, choose_baseline
from sglang_taper.policy.baselines import waiting_order
from sglang_taper.policy.types import AdmissionPlan, StepView


class KeepWidths:
    """No replanning: a plan stands until a branch comes or goes.

    What stands is how many rows of each request run; which ones rotates, longest
    waiting first.
    """

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self._batch: list[int] | None = None
        self._widths: Counter[int] = Counter()

    def plan(self, step: StepView) -> AdmissionPlan:
        # StepBuilder hands out the same list until the batch changes.
        if step.request_of_row is not self._batch:
            plan = self._policy.plan(step)
            self._batch = step.request_of_row
            self._widths = Counter(map(step.request_of_row.__getitem__, plan.rows))
            return plan
        rows = sorted(self._longest_waiting(step))
        reason = "all" if len(rows) == step.num_rows else "kept"
        return AdmissionPlan(rows, reason)

    def _longest_waiting(self, step: StepView) -> list[int]:
        order = waiting_order(step)
        rows = choose_baseline(step, order)
        left = self._widths - Counter(map(step.request_of_row.__getitem__, rows))
        chosen = set(rows)
        for row in order:
            request = step.request_of_row[row]
            if row not in chosen and left[request] > 0:
                left[request] -= 1
                rows.append(row)
        return rows
