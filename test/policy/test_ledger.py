"""The budget of `ledger`: lead, reserve, stalls, and whom it protects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import MODEL, make_request, make_view, plan, view_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_taper.policy.types import AdmissionPlan, RequestView, StepView

NOW_MS, TPOT_MS = 105.0, 20.0


def ahead(lead_ms: float, num_tokens: int = 1, **facts: Any) -> RequestView:
    """A request that is `lead_ms` ahead of its schedule after `num_tokens` tokens."""
    tpot_ms = facts.setdefault("tpot_slo_ms", TPOT_MS)
    origin_ms = NOW_MS + lead_ms - (num_tokens - 1) * tpot_ms
    return make_request(num_tokens=num_tokens, schedule_origin_ms=origin_ms, **facts)


def ledger(*requests: RequestView, width: int = 40, **facts: Any) -> AdmissionPlan:
    """The plan of `width` rows of the first request and one row of each other."""
    widths = [width] + [1] * (len(requests) - 1)
    return plan(make_view(widths, list(requests), **facts), "ledger")


def test_a_request_on_schedule_allows_a_step_of_its_tpot() -> None:
    answer = ledger(ahead(0.0))
    assert answer.budget_ms == answer.predicted_ms == TPOT_MS
    assert answer.rows == list(range(10))
    assert answer.min_slack_ms == TPOT_MS


@pytest.mark.parametrize(("lead_ms", "budget_ms"), [(40.0, 25.0), (-40.0, 15.0)])
def test_a_lead_is_spent_and_a_lag_made_up_over_eight_steps(
    lead_ms: float, budget_ms: float
) -> None:
    assert ledger(ahead(lead_ms)).budget_ms == budget_ms


def test_what_the_model_errs_is_kept_back() -> None:
    model = msgspec.structs.replace(MODEL, error=0.2)
    answer = ledger(ahead(0.0), model=model, stall_share=0.1)
    assert answer.budget_ms == pytest.approx(0.9 * 0.8 * TPOT_MS)


def test_nobody_is_given_up_because_the_model_errs() -> None:
    model = msgspec.structs.replace(MODEL, error=0.6)
    answer = ledger(ahead(0.0), model=model)
    assert (answer.rows, answer.budget_ms) == ([0], answer.baseline_ms)


@pytest.mark.parametrize(("num_tokens", "stalls"), [(100, 1.0), (300, 3.0), (900, 3.0)])
def test_a_reserve_of_up_to_three_stalls_grows_with_the_request(
    num_tokens: int, stalls: float
) -> None:
    answer = ledger(ahead(0.0, num_tokens), mean_stall_ms=8.0)
    assert answer.budget_ms == pytest.approx(TPOT_MS - stalls * 8.0 / 8)


def test_the_reserve_is_at_most_four_tokens_however_long_a_stall_is() -> None:
    model = msgspec.structs.replace(MODEL, a_ms=2.0)
    answer = ledger(ahead(0.0, 900), mean_stall_ms=5000.0, model=model)
    assert answer.budget_ms == pytest.approx(TPOT_MS * (1 - 4 / 8))


@pytest.mark.parametrize(
    ("waiting_ttft_share", "budget_ms"), [(0.5, 20.0), (0.75, 40.0), (0.9, 100.0)]
)
def test_protection_yields_as_a_waiting_request_runs_out_of_time(
    waiting_ttft_share: float, budget_ms: float
) -> None:
    facts = {"num_waiting_prefill": 1, "waiting_ttft_share": waiting_ttft_share}
    answer = ledger(ahead(0.0), width=120, **facts)
    assert answer.budget_ms == pytest.approx(budget_ms)


@pytest.mark.parametrize("waiting_ttft_share", [1.0, 3.0])
def test_nothing_is_protected_once_a_waiting_request_has_missed_its_ttft(
    waiting_ttft_share: float,
) -> None:
    facts = {"waiting_ttft_share": waiting_ttft_share}
    assert ledger(ahead(-40.0), width=90, **facts).reason == "all"


def test_the_share_of_time_that_prefills_take_is_paid_in_advance() -> None:
    assert ledger(ahead(0.0), stall_share=0.25).budget_ms == 15.0


def test_the_smallest_allowance_of_all_requests_is_the_budget() -> None:
    answer = ledger(ahead(0.0), ahead(-40.0), ahead(40.0))
    assert (answer.budget_ms, answer.min_slack_ms) == (15.0, -20.0)


def test_the_budget_is_never_below_the_baseline_step() -> None:
    answer = ledger(ahead(-60.0), *[ahead(0.0)] * 4)
    assert (answer.budget_ms, answer.reason) == (15.0, "budget")
    assert answer.rows == [0, 40, 41, 42, 43]


LOST = {
    "first token late": ahead(0.0, first_token_ms=5000.0),
    "first token can only be late": make_request(
        first_token_ms=None, ttft_slo_ms=NOW_MS - 1
    ),
    "no plan keeps its pace": ahead(0.0, tpot_slo_ms=10.9),
    "no step is short enough": ahead(-73.0),
}


@pytest.mark.parametrize("why", LOST)
def test_a_request_that_cannot_be_saved_does_not_narrow_the_step(why: str) -> None:
    assert ledger(LOST[why]).reason == "all"
    assert ledger(ahead(0.0), LOST[why]).budget_ms == TPOT_MS


def test_a_step_is_wide_when_the_baseline_alone_is_over_every_tpot() -> None:
    crowd = [ahead(0.0)] * 11
    assert ledger(*crowd).reason == "all"
    assert ledger(*crowd[1:]).reason == "budget"


def test_a_lead_that_lasts_to_the_end_is_protected_though_s0_is_too_long() -> None:
    # S0 of 21 ms loses 1 ms per step.
    lasting = ahead(50.0, remaining_tokens=50)
    crowd = [lasting] * 6 + [ahead(0.0)] * 5
    assert ledger(*crowd).reason == "budget"
    short = ahead(50.0, remaining_tokens=51)
    assert ledger(*[short] * 6, *[ahead(0.0)] * 5).reason == "all"


def test_a_minority_that_can_be_saved_does_not_hold_up_the_others() -> None:
    lasting = ahead(50.0, remaining_tokens=50)
    assert ledger(*[lasting] * 5, *[ahead(0.0)] * 6).reason == "all"


@pytest.mark.parametrize("stall_share", [0.0, 0.2, 0.35])
def test_nobody_is_given_up_for_prefills_that_are_soon_over(
    stall_share: float,
) -> None:
    # S0 of 16 ms keeps the TPOT of 20, and would not if it were a fifth longer.
    crowd = [ahead(0.0)] * 6
    assert ledger(*crowd, stall_share=stall_share).reason == "budget"


def test_a_request_that_awaits_its_first_token_is_on_schedule() -> None:
    waiting = make_request(first_token_ms=None, num_tokens=0, ttft_slo_ms=NOW_MS)
    answer = ledger(waiting)
    assert answer.budget_ms == TPOT_MS


def test_rho_and_the_kind_of_deadline_change_nothing() -> None:
    view = make_view((9, 1), [ahead(3.0), ahead(-3.0)])
    first = plan(view, "ledger", rho=0.0, deadline="progress")
    assert first == plan(view, "ledger", rho=1.0, deadline="schedule")
    assert first.reason == "budget"


def test_only_the_baseline_runs_while_the_model_is_not_trusted() -> None:
    model = msgspec.structs.replace(MODEL, trusted=False)
    answer = ledger(ahead(500.0), ahead(500.0), model=model)
    assert (answer.rows, answer.reason) == ([0, 40], "fallback")


def shifted(view: StepView, lead_ms: float) -> StepView:
    requests = [
        msgspec.structs.replace(
            request, schedule_origin_ms=request.schedule_origin_ms + lead_ms
        )
        for request in view.requests
    ]
    return msgspec.structs.replace(view, requests=requests)


# So much capacity that every request keeps its pace and none is ever too late.
FAST = msgspec.structs.replace(MODEL, a_ms=0.0, b_ms_per_row=0.05)


@given(view_strategy(), st.floats(0, 500), st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
def test_more_lead_never_narrows_a_step_and_more_stalls_never_widen_it(
    view: StepView, lead_ms: float, stall_share: float
) -> None:
    requests = [
        ahead(request.schedule_origin_ms - 10, request.num_tokens)
        for request in view.requests
    ]
    view = msgspec.structs.replace(view, requests=requests, model=FAST, stall_share=0.0)
    usual = len(plan(view, "ledger").rows)
    assert len(plan(shifted(view, lead_ms), "ledger").rows) >= usual
    stalled = msgspec.structs.replace(view, stall_share=stall_share)
    assert len(plan(stalled, "ledger").rows) <= usual


@given(view_strategy())
@settings(max_examples=60, deadline=None)
def test_a_lost_request_never_makes_the_budget_smaller(view: StepView) -> None:
    lost = msgspec.structs.replace(view.requests[0], first_token_ms=9e9)
    changed = msgspec.structs.replace(view, requests=[lost, *view.requests[1:]])
    before, after = plan(view, "ledger").budget_ms, plan(changed, "ledger").budget_ms
    if before is None:
        assert after is None
    else:
        assert after is None or after >= before
