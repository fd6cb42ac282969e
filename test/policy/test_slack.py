"""Deadlines, which requests are protected, and the slack of a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from factories import make_request, make_view
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.policy.slack import (
    deadline_ms,
    is_ttft_missed,
    most_urgent,
    reported_slack_ms,
    step_slack,
)
from sglang_taper.policy.types import PolicyParams, StepView

SCHEDULE = PolicyParams(deadline="schedule")
PROGRESS = PolicyParams(deadline="progress")


def slack_of(
    params: PolicyParams,
    baseline_ms: float = 8.0,
    stall_share: float = 0.0,
    **facts: Any,
) -> float | None:
    view = make_view(
        requests=[make_request(**facts)], params=params, stall_share=stall_share
    )
    return slack_ms(view, baseline_ms)


def slack_ms(view: StepView, baseline_ms: float) -> float | None:
    urgent = step_slack(view, baseline_ms)
    return None if urgent is None else urgent.slack_ms


def test_first_token_is_due_at_arrival_plus_ttft_in_both_definitions() -> None:
    request = make_request(first_token_ms=None, arrival_ms=30.0, ttft_slo_ms=200.0)
    assert deadline_ms(request, "schedule") == deadline_ms(request, "progress") == 230.0


def test_schedule_counts_tokens_from_the_first_and_progress_from_the_last() -> None:
    request = make_request(num_tokens=5, schedule_origin_ms=10.0, last_progress_ms=90.0)
    assert deadline_ms(request, "schedule") == 10.0 + 5 * 20.0
    assert deadline_ms(request, "progress") == 90.0 + 20.0


def test_slack_is_the_smallest_over_requests() -> None:
    requests = [make_request(num_tokens=n) for n in (9, 6, 7)]
    assert slack_ms(make_view((1, 2, 1), requests), 8.0) == 10.0 + 6 * 20.0 - 105.0


def test_the_slack_comes_with_the_tpot_of_the_request_that_has_it() -> None:
    requests = [
        make_request(num_tokens=9, tpot_slo_ms=20.0),
        make_request(num_tokens=4, tpot_slo_ms=40.0),
    ]
    urgent = step_slack(make_view((1, 2), requests), 8.0)
    assert urgent == (10.0 + 4 * 40 - 105, 0.0, 40.0)


@pytest.mark.parametrize(
    ("num_tokens", "reserve_ms"), [(5, 0.1 * 30), (50, 30.0), (900, 30.0)]
)
def test_a_request_keeps_up_to_a_mean_prefill_in_reserve(
    num_tokens: int, reserve_ms: float
) -> None:
    view = make_view((1,), [make_request(num_tokens=num_tokens)], mean_stall_ms=30.0)
    urgent = step_slack(view, 8.0)
    assert urgent is not None
    assert urgent.reserve_ms == pytest.approx(reserve_ms)
    assert urgent.slack_ms == 10.0 + num_tokens * 20.0 - 105.0


def test_the_reserve_is_never_more_than_four_tokens() -> None:
    view = make_view((1,), [make_request(num_tokens=900)], mean_stall_ms=5000.0)
    urgent = step_slack(view, 8.0)
    assert urgent is not None
    assert urgent.reserve_ms == 4 * 20.0


def test_with_progress_deadlines_and_before_the_first_token_nothing_is_kept() -> None:
    begun, waiting = make_request(num_tokens=90), make_request(first_token_ms=None)
    for view in (
        make_view((1,), [begun], params=PROGRESS, mean_stall_ms=30.0),
        make_view((1,), [waiting], mean_stall_ms=30.0),
    ):
        urgent = step_slack(view, 8.0)
        assert urgent is not None
        assert urgent.reserve_ms == 0.0


def test_who_has_the_least_beyond_its_reserve_is_urgent() -> None:
    young = make_request(num_tokens=6, schedule_origin_ms=10.0)
    old = make_request(num_tokens=60, schedule_origin_ms=10.0 - 53 * 20.0)
    view = make_view((1, 1), [young, old], mean_stall_ms=100.0)
    urgent = step_slack(view, 8.0)
    assert urgent is not None
    assert (urgent.slack_ms, urgent.reserve_ms) == (45.0, 80.0)


def test_slack_does_not_depend_on_how_far_behind_a_branch_is() -> None:
    ahead = make_view((3,), output_tokens=[9, 9, 9], last_run_step=[49, 49, 49])
    behind = make_view((3,), output_tokens=[9, 9, 0], last_run_step=[49, 49, 3])
    assert step_slack(ahead, 8.0) == step_slack(behind, 8.0)


@pytest.mark.parametrize("params", [SCHEDULE, PROGRESS])
@pytest.mark.parametrize(
    ("first_token_ms", "missed"), [(1000.0, False), (1000.5, True)]
)
def test_a_request_whose_first_token_was_late_is_not_protected(
    params: PolicyParams, first_token_ms: float, missed: bool
) -> None:
    request = make_request(first_token_ms=first_token_ms)
    assert is_ttft_missed(request, 5000.0) is missed
    slack = slack_of(params, first_token_ms=first_token_ms)
    assert (slack is None) is missed


@pytest.mark.parametrize(("ttft_slo_ms", "slack"), [(105.0, 0.0), (104.0, None)])
def test_a_request_without_a_first_token_is_protected_until_its_ttft_passes(
    ttft_slo_ms: float, slack: float | None
) -> None:
    facts = {"first_token_ms": None, "ttft_slo_ms": ttft_slo_ms}
    assert slack_of(SCHEDULE, **facts) == slack_of(PROGRESS, **facts) == slack


# 15 ms late with TPOT 20: an S0 of 15 ms wins 5 ms per step back, so 3 steps.
LATE = {"num_tokens": 4, "tpot_slo_ms": 20.0}


@pytest.mark.parametrize(("remaining", "slack"), [(3, -15.0), (2, None)])
def test_a_late_request_is_protected_only_while_it_can_catch_up_before_its_end(
    remaining: int, slack: float | None
) -> None:
    assert slack_of(SCHEDULE, 15.0, remaining_tokens=remaining, **LATE) == slack


@pytest.mark.parametrize("stall_share", [0.5, 0.9])
def test_a_late_request_is_not_given_up_for_the_prefills_that_made_it_late(
    stall_share: float,
) -> None:
    facts = {"stall_share": stall_share, **LATE}
    assert slack_of(SCHEDULE, 15.0, remaining_tokens=3, **facts) == -15.0
    assert slack_of(SCHEDULE, 15.0, remaining_tokens=2, **facts) is None


@pytest.mark.parametrize("baseline_ms", [20.0, 25.0])
def test_a_late_request_that_s0_cannot_speed_up_is_not_protected(
    baseline_ms: float,
) -> None:
    assert slack_of(SCHEDULE, baseline_ms, remaining_tokens=10**6, **LATE) is None


def test_a_request_ahead_of_schedule_is_protected_even_if_s0_is_too_long() -> None:
    assert slack_of(SCHEDULE, 25.0, num_tokens=6) == 25.0


@pytest.mark.parametrize(
    ("baseline_ms", "stall_share", "slack"),
    [(20.0, 0.0, 15.0), (20.1, 0.0, None), (10.0, 0.5, 15.0), (10.1, 0.5, None)],
)
def test_progress_protects_nobody_whose_tpot_is_below_the_stretched_s0(
    baseline_ms: float, stall_share: float, slack: float | None
) -> None:
    assert slack_of(PROGRESS, baseline_ms, stall_share) == slack


def test_prefills_that_take_all_the_time_leave_nobody_to_protect() -> None:
    assert slack_of(PROGRESS, 8.0, stall_share=1.0) is None


def test_a_lost_request_does_not_hide_the_slack_of_the_others() -> None:
    lost = make_request(first_token_ms=5000.0, num_tokens=1)
    view = make_view((1, 1), [lost, make_request(num_tokens=8)])
    assert slack_ms(view, 8.0) == 65.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), st.floats(0.1, 1e4))
def test_reported_slack_keeps_order_and_stays_above_minus_two_tpot(
    slacks: list[float], tpot_ms: float
) -> None:
    reported = [reported_slack_ms(slack, tpot_ms) for slack in sorted(slacks)]
    assert all(low <= high for low, high in pairwise(reported))
    assert all(value >= -2 * tpot_ms for value in reported)


def test_reported_slack_is_exact_down_to_minus_one_tpot() -> None:
    assert [reported_slack_ms(s, 20.0) for s in (7.0, -19.0, -20.0)] == [7, -19, -20]
    assert reported_slack_ms(-40.0, 20.0) == -30.0


def test_an_absurdly_small_target_is_lost_not_an_error() -> None:
    assert slack_of(SCHEDULE, 0.0, **{**LATE, "tpot_slo_ms": 5e-324}) is None


def test_most_urgent_is_whose_next_token_is_due_first() -> None:
    soon = make_request(first_token_ms=None, arrival_ms=0.0, ttft_slo_ms=110.0)
    later = make_request(first_token_ms=None, arrival_ms=0.0, ttft_slo_ms=300.0)
    view = make_view(requests=[later, soon], now_ms=100.0)
    request, slack_ms = most_urgent(view)
    assert (request.ttft_slo_ms, slack_ms) == (110.0, 10.0)


def test_who_is_late_already_is_the_most_urgent_only_where_all_are() -> None:
    late = make_request(first_token_ms=None, arrival_ms=0.0, ttft_slo_ms=50.0)
    in_time = make_request(first_token_ms=None, arrival_ms=0.0, ttft_slo_ms=300.0)
    request, _ = most_urgent(make_view(requests=[late, in_time], now_ms=100.0))
    assert request.ttft_slo_ms == 300.0
    _, slack_ms = most_urgent(make_view(requests=[late, late], now_ms=100.0))
    assert slack_ms == -50.0
