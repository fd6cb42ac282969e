"""LEDGER: a budget from what each request is ahead of its schedule over its life."""

from __future__ import annotations

import math

from sglang_taper.policy.filling import Budget, plan_within
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.slack import reported_slack_ms
from sglang_taper.policy.types import AdmissionPlan, RequestView, StepView

# A lead is spent over so many steps. Longer makes the width swing, and a stall that
# comes meanwhile is paid too late.
HORIZON_STEPS = 8
# Requests are kept up to so many tokens ahead of schedule, because a mean TPOT just
# above its target is a miss; the reserve grows by this much per token.
RESERVE_TOKENS, RESERVE_GROWTH = 2.0, 0.02


class LedgerPolicy:
    """Fill the step up to the smallest allowance of the requests worth protecting.

    After k tokens of all its branches a request is ahead of schedule by
    `lead = origin + (k - 1) * TPOT - now` (`origin` as in `RequestView`), and the
    next step may take

        allowance = (1 - stall_share) * (TPOT + (lead - reserve) / HORIZON_STEPS)

    with `reserve = min(RESERVE_GROWTH * (k - 1), RESERVE_TOKENS) * TPOT`, or 0 while
    prefills wait for room. The budget is the smallest allowance, S0 at least. A
    request is left out when its TTFT is missed, when S0 is longer than its TPOT less
    stalls, and when it is so late that no step is short enough for its allowance; if
    all are, nothing limits the step. Raises FieldError for an unknown
    `params.utility`.
    """

    def plan(self, step: StepView) -> AdmissionPlan:
        return plan_within(step, _allowed_budget)


def _allowed_budget(step: StepView, baseline_ms: float) -> Budget:
    decode_share = 1 - step.stall_share
    shortest_ms = predict_ms(step.model, 1, 0)
    max_reserve = 0.0 if step.num_waiting_prefill else RESERVE_TOKENS
    budget_ms, slack_ms, tpot_slo_ms = math.inf, 0.0, 0.0
    for request in step.requests:
        if decode_share * request.tpot_slo_ms < baseline_ms:
            continue
        lead_ms = _lead_ms(request, step.now_ms)
        if lead_ms is None:
            continue
        tpot_ms = request.tpot_slo_ms
        grown = RESERVE_GROWTH * max(0, request.num_tokens - 1)
        spare_ms = lead_ms - min(grown, max_reserve) * tpot_ms
        allowed_ms = decode_share * (tpot_ms + spare_ms / HORIZON_STEPS)
        if shortest_ms <= allowed_ms < budget_ms:
            budget_ms, slack_ms, tpot_slo_ms = allowed_ms, lead_ms + tpot_ms, tpot_ms
    if budget_ms == math.inf:
        return Budget(None, None)
    return Budget(max(baseline_ms, budget_ms), reported_slack_ms(slack_ms, tpot_slo_ms))


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
