"""LEDGER: a budget from what each request is ahead of its schedule over its life."""

from __future__ import annotations

import math

from sglang_taper.policy.filling import Budget, plan_within
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.slack import SCHEDULE, deadline_ms, reported_slack_ms
from sglang_taper.policy.types import AdmissionPlan, RequestView, StepView

# A lead is spent over so many steps. Longer makes the width swing, and a stall that
# comes meanwhile is paid too late.
HORIZON_STEPS = 8
# A mean TPOT just above its target is a miss, and what pushes a request over it is a
# prefill at the wrong moment: so requests are kept ahead of schedule by the length of
# a few stalls, more the longer they have lived, but never by many tokens.
RESERVE_STALLS, RESERVE_STALLS_PER_TOKEN = 3.0, 0.01
MAX_RESERVE_TOKENS = 4.0
# Share of its TTFT SLO after which a request that waits for room weighs on the others.
YIELD_FROM = 0.5


class LedgerPolicy:
    """Fill the step up to the smallest allowance of the requests worth protecting.

    After k tokens of all its branches a request is ahead of schedule by
    `lead = origin + (k - 1) * TPOT - now` (`origin` as in `RequestView`), and the
    next step may take

        allowance = (1 - stall_share) * (TPOT + (lead - reserve) / HORIZON_STEPS)

    with a reserve that grows to RESERVE_STALLS mean stalls. The budget is the smallest
    allowance, S0 at least, divided by `1 - y`: y grows from 0 to 1 while a request
    that waits for room uses up the last part of its TTFT SLO, and those that have
    room are protected less and less. A request is left out when its TTFT is missed,
    when S0 is longer than its TPOT less stalls, and when it is so late that no step
    is short enough for its allowance; if all are, nothing limits the step. Raises
    FieldError for an unknown `params.utility`.
    """

    def plan(self, step: StepView) -> AdmissionPlan:
        return plan_within(step, allowed_budget)


def allowed_budget(step: StepView, baseline_ms: float) -> Budget:
    """The smallest allowance of the protected requests, as `LedgerPolicy` says."""
    yielding = (step.waiting_ttft_share - YIELD_FROM) / (1 - YIELD_FROM)
    if yielding >= 1:
        return Budget(None, None)
    decode_share = 1 - step.stall_share
    shortest_ms = predict_ms(step.model, 1, 0)
    smallest_ms, tightest = math.inf, None
    for request in step.requests:
        if decode_share * request.tpot_slo_ms < baseline_ms:
            continue
        allowed_ms = allowance_ms(request, step)
        if allowed_ms is not None and shortest_ms <= allowed_ms < smallest_ms:
            smallest_ms, tightest = allowed_ms, request
    if tightest is None:
        return Budget(None, None)
    slack_ms = deadline_ms(tightest, SCHEDULE) - step.now_ms
    return Budget(
        max(baseline_ms, smallest_ms / (1 - max(0.0, yielding))),
        reported_slack_ms(slack_ms, tightest.tpot_slo_ms),
    )


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
