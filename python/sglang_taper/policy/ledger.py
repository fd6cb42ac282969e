"""LEDGER: a budget from what each request is ahead of its schedule over its life."""

from __future__ import annotations

from operator import itemgetter

from sglang_taper.policy.filling import Budget, plan_within
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.slack import (
    MAX_RESERVE_TOKENS,
    SCHEDULE,
    deadline_ms,
    reported_slack_ms,
)
from sglang_taper.policy.types import AdmissionPlan, RequestView, StepView

# A lead is spent over so many steps. Longer makes the width swing, and a stall that
# comes meanwhile is paid too late.
HORIZON_STEPS = 8
# A mean TPOT just above its target is a miss, and what pushes a request over it is a
# prefill at the wrong moment: so requests are kept ahead of schedule by the length of
# a few stalls, more the longer they have lived, but never by many tokens.
RESERVE_STALLS, RESERVE_STALLS_PER_TOKEN = 3.0, 0.01
# Share of its TTFT SLO after which a request that waits for room weighs on the others.
YIELD_FROM = 0.5


class LedgerPolicy:
    """Fill the step up to the smallest allowance of the requests worth protecting.

    After k tokens of all its branches a request is ahead of schedule by
    `lead = origin + (k - 1) * TPOT - now` (`origin` as in `RequestView`), and the
    next step may take

        allowance = (1 - stall_share) * (TPOT + (lead - reserve) / HORIZON_STEPS)

    with a reserve that grows to RESERVE_STALLS mean stalls. The budget is the smallest
    allowance times `1 - error` of the model, S0 at least, divided by `1 - y`: y grows
    from 0 to 1 while a request that waits for room uses up the last part of its TTFT
    SLO, and those that have room are protected less and less. A request is left out
    when its TTFT is missed and when it is so late that no step is short enough for its
    allowance. When S0 is longer than the TPOT of some requests, those of them whose
    lead lasts to their end are protected if they are at least half of them, else none
    is. If all are left out, nothing limits the step. Raises FieldError for an unknown
    `params.utility`.
    """

    def plan(self, step: StepView) -> AdmissionPlan:
        return plan_within(step, allowed_budget)


def allowed_budget(step: StepView, baseline_ms: float) -> Budget:
    """The smallest allowance of the protected requests, as `LedgerPolicy` says."""
    yielding = (step.waiting_ttft_share - YIELD_FROM) / (1 - YIELD_FROM)
    if yielding >= 1:
        return Budget(None, None)
    tightest = _tightest(step, baseline_ms)
    if tightest is None:
        return Budget(None, None)
    allowed_ms, request = tightest
    slack_ms = deadline_ms(request, SCHEDULE) - step.now_ms
    # Only here: whom a step is too long for does not depend on how sure that is.
    allowed_ms *= 1 - step.model.error
    return Budget(
        max(baseline_ms, allowed_ms / (1 - max(0.0, yielding))),
        reported_slack_ms(slack_ms, request.tpot_slo_ms),
    )


def _tightest(step: StepView, baseline_ms: float) -> tuple[float, RequestView] | None:
    """The smallest allowance of a protected request, and whose it is."""
    shortest_ms = predict_ms(step.model, 1, 0)
    keeping: list[tuple[float, RequestView]] = []
    lasting: list[tuple[float, RequestView]] = []
    num_slow = 0
    for request in step.requests:
        allowed_ms = allowance_ms(request, step)
        gain_ms = request.tpot_slo_ms - baseline_ms
        num_slow += gain_ms < 0
        if allowed_ms is None or allowed_ms < shortest_ms:
            continue
        if gain_ms >= 0:
            keeping.append((allowed_ms, request))
        elif _lead_lasts(request, gain_ms, step.now_ms):
            lasting.append((allowed_ms, request))
    if 2 * len(lasting) >= num_slow:
        keeping += lasting
    return min(keeping, key=itemgetter(0), default=None)


def _lead_lasts(request: RequestView, gain_ms: float, now_ms: float) -> bool:
    """Whether it ends on schedule if each step to come adds `gain_ms` to its lead."""
    lead_ms = _lead_ms(request, now_ms)
    return lead_ms is not None and lead_ms + gain_ms * request.remaining_tokens >= 0


def allowance_ms(request: RequestView, step: StepView) -> float | None:
    """How long the next step may take for `request`; None when its TTFT is missed.

    Smaller than any step when it is far behind, and even negative.
    """
    lead_ms, tpot_ms = _lead_ms(request, step.now_ms), request.tpot_slo_ms
    if lead_ms is None:
        return None
    stalls = min(RESERVE_STALLS, RESERVE_STALLS_PER_TOKEN * request.num_tokens)
    reserve_ms = min(stalls * step.mean_stall_ms, MAX_RESERVE_TOKENS * tpot_ms)
    spare_ms = (lead_ms - reserve_ms) / HORIZON_STEPS
    return (1 - step.stall_share) * (tpot_ms + spare_ms)


def _lead_ms(request: RequestView, now_ms: float) -> float | None:
    """How far ahead of schedule; None when the first token is, or will be, late."""
    first_ms = request.first_token_ms
    ttft_due_ms = request.arrival_ms + request.ttft_slo_ms
    if first_ms is None:
        return 0.0 if now_ms <= ttft_due_ms else None
    if first_ms > ttft_due_ms:
        return None
    ahead_ms = (request.num_tokens - 1) * request.tpot_slo_ms
    return request.schedule_origin_ms + ahead_ms - now_ms
