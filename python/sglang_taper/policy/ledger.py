"""LEDGER: a budget from what each request is ahead of its schedule over its life."""

from __future__ import annotations

import math

from sglang_taper.policy.filling import Budget, plan_within
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.slack import reported_slack_ms
from sglang_taper.policy.types import AdmissionPlan, RequestView, StepView

# A lead is spent over so many steps. Longer makes the width swing, and a stall that
# comes meanwhile is paid too late.
HORIZON_STEPS = 12
# A mean TPOT just above its target is a miss, and what pushes a request over it is a
# prefill at the wrong moment: so requests are kept ahead of schedule by the length of
# a few stalls, more the longer they have lived, but never by many tokens.
RESERVE_STALLS, RESERVE_STALLS_PER_TOKEN = 3.0, 0.01
MAX_RESERVE_TOKENS = 4.0


class LedgerPolicy:
    """Fill the step up to the smallest allowance of the requests worth protecting.

    After k tokens of all its branches a request is ahead of schedule by
    `lead = origin + (k - 1) * TPOT - now` (`origin` as in `RequestView`), and the
    next step may take

        allowance = (1 - stall_share) * (TPOT + (lead - reserve) / HORIZON_STEPS)

    with a reserve that grows to RESERVE_STALLS mean stalls, and is 0 while prefills
    wait for room. The budget is the smallest allowance, S0 at least, divided by
    `1 - waiting_ttft_share`: as a request that waits for room runs out of time, those
    that have it are protected less. A request is left out when its TTFT is missed,
    when S0 is longer than its TPOT less stalls, and when it is so late that no step
    is short enough for its allowance; if all are, nothing limits the step. Raises
    FieldError for an unknown `params.utility`.
    """

    def plan(self, step: StepView) -> AdmissionPlan:
        return plan_within(step, _allowed_budget)


def _allowed_budget(step: StepView, baseline_ms: float) -> Budget:
    yielding = 1 - step.waiting_ttft_share
    if yielding <= 0:
        return Budget(None, None)
    decode_share = 1 - step.stall_share
    shortest_ms = predict_ms(step.model, 1, 0)
    allowed_ms, lead_ms, tpot_slo_ms = math.inf, 0.0, 0.0
    for request in step.requests:
        tpot_ms = request.tpot_slo_ms
        if decode_share * tpot_ms < baseline_ms:
            continue
        ahead_ms = _lead_ms(request, step.now_ms)
        if ahead_ms is None:
            continue
        spare_ms = ahead_ms - _reserve_ms(request, step)
        its_ms = decode_share * (tpot_ms + spare_ms / HORIZON_STEPS)
        if shortest_ms <= its_ms < allowed_ms:
            allowed_ms, lead_ms, tpot_slo_ms = its_ms, ahead_ms, tpot_ms
    if allowed_ms == math.inf:
        return Budget(None, None)
    slack_ms = reported_slack_ms(lead_ms + tpot_slo_ms, tpot_slo_ms)
    return Budget(max(baseline_ms, allowed_ms / yielding), slack_ms)


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


def _reserve_ms(request: RequestView, step: StepView) -> float:
    """How far ahead of schedule `request` is to be kept."""
    if step.num_waiting_prefill:
        return 0.0
    stalls = RESERVE_STALLS_PER_TOKEN * max(0, request.num_tokens - 1)
    reserve_ms = min(RESERVE_STALLS, stalls) * step.mean_stall_ms
    return min(reserve_ms, MAX_RESERVE_TOKENS * request.tpot_slo_ms)
