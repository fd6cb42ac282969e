"""From S0 and a budget to the rows of a step: what predicting policies share.

A policy brings a rule for the budget; how a step is filled is the same for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from math import log1p
from typing import NamedTuple

from sglang_taper.errors import FieldError
from sglang_taper.policy.baselines import choose_baseline, waiting_order
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.types import AdmissionPlan, StepView


class Budget(NamedTuple):
    """Time a step may take, and the slack it comes from; both None: no limit."""

    budget_ms: float | None
    min_slack_ms: float | None


class Start(NamedTuple):
    """S0 (`baseline`, with its KV tokens and predicted time) and the waiting order."""

    order: list[int]
    baseline: list[int]
    kv_tokens: int
    baseline_ms: float


def start_of(step: StepView) -> Start:
    order = waiting_order(step)
    baseline = choose_baseline(step, order)
    kv_tokens = step_kv_tokens(step, baseline)
    baseline_ms = predict_ms(step.model, len(baseline), kv_tokens)
    return Start(order, baseline, kv_tokens, baseline_ms)


def plan_within(
    step: StepView,
    budget_rule: Callable[[StepView, float], Budget],
    ties: Callable[[StepView], list[int]] = waiting_order,
    start: Start | None = None,
) -> AdmissionPlan:
    """S0 and as many extra branches as `budget_rule(step, baseline_ms)` has time for.

    Extra rows come in the order of `params.utility`, ties in the order of `ties`
    (longest waiting first), up to the first one that does not fit. S0 alone, with
    reason `fallback`, while the latency model is not trusted. Raises FieldError for
    an unknown utility. `start` is `start_of(step)` if the caller has it already.
    """
    if step.params.utility not in _RANKINGS:
        accepted = "one of " + ", ".join(_RANKINGS)
        raise FieldError("utility", step.params.utility, accepted)
    order, baseline, kv_tokens, baseline_ms = start or start_of(step)
    if not step.model.trusted:
        full = len(baseline) == step.num_rows
        return AdmissionPlan(baseline, "all" if full else "fallback")
    budget_ms, min_slack_ms = budget_rule(step, baseline_ms)
    if ties is not waiting_order:
        order = ties(step)
    rows, predicted_ms = _fill(step, order, baseline, kv_tokens, budget_ms)
    return AdmissionPlan(
        rows=rows,
        reason="all" if len(rows) == step.num_rows else "budget",
        baseline_ms=baseline_ms,
        predicted_ms=predicted_ms,
        budget_ms=budget_ms,
        min_slack_ms=min_slack_ms,
    )


def step_kv_tokens(view: StepView, rows: list[int]) -> int:
    """KV tokens a step of `rows` reads, as `LatencyCoefficients` counts them.

    With `shared_read_once` the longest shared prefix among a request's rows counts
    once, and each row adds what is its own.
    """
    context = sum(map(view.context_tokens.__getitem__, rows))
    if not view.model.shared_read_once:
        return context
    shared = sum(map(view.shared_tokens.__getitem__, rows))
    return context - shared + sum(_shared_prefixes(view, rows))


def _shared_prefixes(view: StepView, rows: list[int]) -> list[int]:
    """Per request the longest `shared_tokens` among `rows`; 0 without a row."""
    prefixes = [0] * len(view.requests)
    for row in rows:
        request, shared = view.request_of_row[row], view.shared_tokens[row]
        if shared > prefixes[request]:
            prefixes[request] = shared
    return prefixes


def _added_tokens(view: StepView, baseline: list[int]) -> list[int]:
    """KV tokens each row would add to a step that holds `baseline`.

    An upper bound for rows that share a longer prefix than their baseline row does,
    exact otherwise.
    """
    if not view.model.shared_read_once:
        return view.context_tokens
    prefixes = _shared_prefixes(view, baseline)
    return [
        context - (shared if shared < prefixes[request] else prefixes[request])
        for context, shared, request in zip(
            view.context_tokens, view.shared_tokens, view.request_of_row, strict=True
        )
    ]


def _fill(
    step: StepView,
    order: list[int],
    baseline: list[int],
    kv_tokens: int,
    budget_ms: float | None,
) -> tuple[list[int], float]:
    """The rows that fit `budget_ms` (None: all), ascending, and their predicted ms."""
    model, num_baseline = step.model, len(baseline)
    added = _added_tokens(step, baseline)
    added_by_extra = sum(added) - sum(map(added.__getitem__, baseline))
    all_ms = predict_ms(model, step.num_rows, kv_tokens + added_by_extra)
    if budget_ms is None or all_ms <= budget_ms:
        return list(range(step.num_rows)), all_ms
    extra = _ranked(step, baseline, _without(order, baseline), added)
    totals = list(accumulate(map(added.__getitem__, extra), initial=kv_tokens))

    def step_ms(count: int) -> float:
        return predict_ms(model, num_baseline + count, totals[count])

    # S0 (count 0) always runs, so the search is for how many more fit.
    count = bisect_right(range(1, len(totals)), budget_ms, key=step_ms)
    return sorted(baseline + extra[:count]), step_ms(count)


def _without(order: list[int], baseline: list[int]) -> list[int]:
    """`order` less the rows of `baseline`."""
    chosen = set(baseline)
    return [row for row in order if row not in chosen]


def _ranked(
    step: StepView, baseline: list[int], extra: list[int], added: list[int]
) -> list[int]:
    """`extra` by utility per marginal ms, best first; `extra` breaks ties.

    A row's marginal ms are taken without rounding to a captured graph size: the
    rounding depends on how many rows run, not on which, and would make rows free.
    """
    if step.model.c_ms_per_token > 0:
        extra = sorted(extra, key=added.__getitem__)
    return _RANKINGS[step.params.utility](step, baseline, extra, added)


def _rank_linear(
    step: StepView, baseline: list[int], extra: list[int], added: list[int]
) -> list[int]:
    """Every branch is worth the same: cheapest first, which `extra` already is."""
    return extra


def _rank_priority(
    step: StepView, baseline: list[int], extra: list[int], added: list[int]
) -> list[int]:
    """A branch is worth its request's priority."""
    b_ms, c_ms = step.model.b_ms_per_row, step.model.c_ms_per_token
    weights = [request.priority for request in step.requests]
    price = [
        (b_ms + c_ms * tokens) / weights[request]
        for tokens, request in zip(added, step.request_of_row, strict=True)
    ]
    return sorted(extra, key=price.__getitem__)


def _rank_concave(
    step: StepView, baseline: list[int], extra: list[int], added: list[int]
) -> list[int]:
    """A request of width w is worth log(1 + w), so each further branch adds less.

    Within a request costs rise and gains fall along `extra`, so one sort of the
    prices is the greedy choice and no heap is needed.
    """
    b_ms, c_ms = step.model.b_ms_per_row, step.model.c_ms_per_token
    owner, width = step.request_of_row, [0] * len(step.requests)
    for row in baseline:
        width[owner[row]] += 1
    widest = max(Counter(owner).values())
    gains = [log1p(1 / (1 + size)) for size in range(widest)]
    price = [0.0] * step.num_rows
    for row in extra:
        request = owner[row]
        price[row] = (b_ms + c_ms * added[row]) / gains[width[request]]
        width[request] += 1
    return sorted(extra, key=price.__getitem__)


def _by_request(
    key: Callable[[StepView], list[float]],
) -> Callable[[StepView, list[int], list[int], list[int]], list[int]]:
    """All extra branches of one request before those of the next, cheapest inside."""

    def rank(
        step: StepView, baseline: list[int], extra: list[int], added: list[int]
    ) -> list[int]:
        keys = key(step)
        return sorted(extra, key=[keys[i] for i in step.request_of_row].__getitem__)

    return rank


def _age(step: StepView) -> list[float]:
    return [request.arrival_ms for request in step.requests]


def _need(step: StepView) -> list[float]:
    """Narrowest stage first: it takes the fewest rows to run a request whole."""
    widths = Counter(step.request_of_row)
    return [widths[i] for i in range(len(step.requests))]


def _finishing(step: StepView) -> list[float]:
    return [request.remaining_tokens for request in step.requests]


_RANKINGS = {
    "linear": _rank_linear,
    "concave": _rank_concave,
    "priority": _rank_priority,
    "age": _by_request(_age),
    "need": _by_request(_need),
    "finishing": _by_request(_finishing),
}
