"""Whom `triage` serves when not everybody can be saved."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from factories import (
    MODEL,
    DecodeLoop,
    Program,
    make_request,
    make_view,
    params_strategy,
    plan,
    view_strategy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_taper.policy.state import RequestState
from sglang_taper.policy.triage import MAX_PAUSE_STEPS
from sglang_taper.policy.types import (
    AdmissionPlan,
    PolicyParams,
    RequestView,
    StepView,
)

TPOT_MS = 15.0


def ahead(lead_ms: float, **facts: Any) -> RequestView:
    """Ahead of its schedule by `lead_ms`, at 105 ms, after its first token."""
    changed = {"num_tokens": 1, "schedule_origin_ms": 105.0 + lead_ms, **facts}
    return make_request(tpot_slo_ms=TPOT_MS, **changed)


def triage(*leads_ms: float, **facts: Any) -> AdmissionPlan:
    """Requests of one row each, S0 = 10 + their number ms."""
    requests = [ahead(lead_ms) for lead_ms in leads_ms]
    return plan(make_view([1] * len(requests), requests, **facts), "triage")


def test_it_plans_as_ledger_while_everybody_can_be_saved() -> None:
    view = make_view((9, 1), [ahead(24.0), ahead(12.0)])
    assert plan(view, "triage") == plan(view, "ledger")
    assert plan(view, "triage").reason == "budget"


def test_in_overload_as_many_run_as_their_allowances_have_time_for() -> None:
    answer = triage(*[0.0] * 8)
    assert (answer.rows, answer.reason) == ([0, 1, 2, 3, 4], "triage")
    assert (answer.predicted_ms, answer.budget_ms) == (15.0, 15.0)


def test_those_furthest_ahead_run_and_those_behind_are_paused() -> None:
    answer = triage(0.0, -48.0, 36.0, -48.0, 12.0, -48.0, 0.0, -48.0)
    assert answer.rows == [0, 1, 2, 4, 6]
    assert triage(0.0, -48.0, 36.0, -72.0, 12.0, 0.0, 0.0).rows == [0, 2, 4, 5, 6]


def test_a_smaller_allowance_than_the_step_is_no_limit_to_the_others() -> None:
    # Any step takes at least 11 ms: the second request would allow 10.
    assert triage(0.0, -60.0, *[0.0] * 6).budget_ms == TPOT_MS


def test_time_left_goes_to_late_requests_longest_waiting_first() -> None:
    facts = {"last_run_step": [49, 49, 30, 20, 49, 49, 49]}
    late = [-600.0] * 5
    assert triage(0.0, 0.0, *late, **facts).rows == [0, 1, 2, 3, 4]


def test_it_goes_wide_when_nobody_can_be_saved() -> None:
    answer = triage(*[-600.0] * 8)
    assert answer.reason == "all"


def test_a_request_that_missed_its_ttft_is_late() -> None:
    lost = ahead(60.0, first_token_ms=5000.0)
    requests = [lost, *[ahead(0.0)] * 7]
    assert plan(make_view([1] * 8, requests), "triage").rows == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("last_run_step", "runs"), [(-14, True), (-13, False)])
def test_a_request_is_not_paused_for_longer_than_the_limit(
    last_run_step: int, runs: bool
) -> None:
    waited = [last_run_step, *[49] * 7]
    answer = triage(-600.0, *[0.0] * 7, last_run_step=waited)
    assert (0 in answer.rows) is runs
    assert MAX_PAUSE_STEPS == 50 + 14


def test_only_the_baseline_runs_while_the_model_is_not_trusted() -> None:
    model = msgspec.structs.replace(MODEL, trusted=False)
    assert triage(*[0.0] * 8, model=model).rows == list(range(8))


@given(view_strategy())
@settings(max_examples=100, deadline=None)
def test_any_view_gets_a_plan_of_valid_rows(view: StepView) -> None:
    answer = plan(view, "triage")
    assert answer.rows == sorted(set(answer.rows))
    assert answer.rows
    assert set(view.must_run) <= set(answer.rows) <= set(range(view.num_rows))
    assert (answer.reason == "all") == (len(answer.rows) == view.num_rows)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=StepView)
    assert plan(again, "triage") == answer


@given(
    st.lists(st.sampled_from([6.0, 12.0, 18.0]), min_size=2, max_size=12),
    params_strategy(),
)
@settings(max_examples=25, deadline=None)
def test_every_request_advances_within_the_limit_until_all_have_ended(
    tpots_ms: list[float], params: PolicyParams
) -> None:
    params = msgspec.structs.replace(params, policy="triage")
    programs = [
        Program(RequestState("g", 0.0, 2000.0, tpot_ms), [40, (30, 20), 30], 5)
        for tpot_ms in tpots_ms
    ]
    loop = DecodeLoop(params, MODEL, programs)
    waited: dict[RequestState, int] = {}
    while loop.waiting or loop.states:
        if loop.prefill():
            continue
        view, answer = loop.decide()
        ran = {loop.states[row].request for row in answer.rows}
        for state in {state.request for state in loop.states}:
            waited[state] = 0 if state in ran else waited.get(state, 0) + 1
            assert waited[state] <= MAX_PAUSE_STEPS
        loop.apply(view, answer)
