"""The baseline step S0, and the policies that predict nothing: off, eager, cap."""

from __future__ import annotations

from sglang_taper.policy.types import AdmissionPlan, StepView


def waiting_order(view: StepView) -> list[int]:
    """All rows, longest waiting first.

    Ordered by (`last_run_step`, `output_tokens`, row); within a request the order of
    rows is the order in which its branches joined. Stable sorts on plain ints take a
    third of the time of one sort on tuples.
    """
    order = sorted(range(view.num_rows), key=view.output_tokens.__getitem__)
    order.sort(key=view.last_run_step.__getitem__)
    return order


def choose_baseline(view: StepView, order: list[int] | None = None) -> list[int]:
    """S0: of every request the row that has waited longest, and all `must_run` rows.

    A `must_run` row that still has tokens to produce is its request's baseline row,
    so a request does not run two rows because of one it is made to run. `order` is
    `waiting_order(view)` if the caller has it already. Ascending row indices.
    """
    first: list[int] = [0] * len(view.requests)
    request_of_row = view.request_of_row
    for row in reversed(waiting_order(view) if order is None else order):
        first[request_of_row[row]] = row
    if view.must_run:
        _prefer_must_run(view, first)
    return sorted({*first, *view.must_run})


def _prefer_must_run(view: StepView, first: list[int]) -> None:
    """Replace in `first` (request -> row) where `must_run` decides; in place."""
    finished = {row for row in view.must_run if view.remaining_tokens[row] <= 0}
    for row in finished.intersection(first):
        request = view.request_of_row[row]
        first[request] = min(
            (r for r in view.rows_of(request) if r not in finished),
            key=lambda r: (view.last_run_step[r], view.output_tokens[r], r),
            default=row,
        )
    for row in view.must_run:
        if row not in finished:
            first[view.request_of_row[row]] = row


class OffPolicy:
    """One branch per request and step, rotating so that every sibling moves."""

    def plan(self, step: StepView) -> AdmissionPlan:
        rows = choose_baseline(step)
        return AdmissionPlan(rows, _reason(step, rows, "baseline"))


class EagerPolicy:
    """Every branch in every step: SGLang's own behaviour."""

    def plan(self, step: StepView) -> AdmissionPlan:
        return AdmissionPlan(list(range(step.num_rows)), "all")


class CapPolicy:
    """At most `params.cap` branches per request, longest waiting first."""

    def plan(self, step: StepView) -> AdmissionPlan:
        order = waiting_order(step)
        chosen = set(choose_baseline(step, order))
        free = [step.params.cap] * len(step.requests)
        for row in chosen:
            free[step.request_of_row[row]] -= 1
        for row in order:
            request = step.request_of_row[row]
            if free[request] > 0 and row not in chosen:
                free[request] -= 1
                chosen.add(row)
        rows = sorted(chosen)
        return AdmissionPlan(rows, _reason(step, rows, "cap"))


def _reason(step: StepView, rows: list[int], constraint: str) -> str:
    return "all" if len(rows) == step.num_rows else constraint
