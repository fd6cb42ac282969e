"""Invariants 1, 2, 3 and 5 of the policies, over views and over decode loops."""

from __future__ import annotations

import copy

import msgspec
from factories import (
    DecodeLoop,
    Program,
    model_strategy,
    params_strategy,
    view_strategy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_taper.policy.admission import (
    choose_baseline,
    make_policy,
    step_kv_tokens,
)
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.state import BranchState, RequestState
from sglang_taper.policy.types import (
    AdmissionPlan,
    LatencyCoefficients,
    PolicyParams,
    StepView,
)


def assert_every_request_advances(view: StepView, plan: AdmissionPlan) -> None:
    ran = {view.request_of_row[row] for row in plan.rows}
    assert ran == set(range(len(view.requests)))


def assert_rows_are_valid(view: StepView, plan: AdmissionPlan) -> None:
    assert plan.rows == sorted(set(plan.rows))
    assert set(plan.rows) <= set(range(view.num_rows))
    assert set(view.must_run) <= set(plan.rows)
    assert (plan.reason == "all") == (len(plan.rows) == view.num_rows)


def assert_prediction_fits_budget(view: StepView, plan: AdmissionPlan) -> None:
    if plan.budget_ms is None or plan.rows == choose_baseline(view):
        return
    tokens = step_kv_tokens(view, plan.rows)
    counted_ms = predict_ms(view.model, len(plan.rows), tokens)
    assert plan.predicted_ms is not None
    assert counted_ms <= plan.predicted_ms <= plan.budget_ms


def assert_plan_is_a_function(view: StepView, plan: AdmissionPlan) -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=StepView)
    assert make_policy(view.params.policy).plan(again) == plan


@given(view_strategy())
@settings(max_examples=120, deadline=None)
def test_any_view_gets_a_plan_that_keeps_invariants_1_2_and_3(view: StepView) -> None:
    before = copy.deepcopy(view)
    plan = make_policy(view.params.policy).plan(view)
    assert_every_request_advances(view, plan)
    assert_rows_are_valid(view, plan)
    assert_prediction_fits_budget(view, plan)
    assert_plan_is_a_function(view, plan)
    assert view == before


@st.composite
def program_strategy(draw: st.DrawFn) -> Program:
    state = RequestState(
        "g",
        arrival_ms=draw(st.sampled_from([0.0, 3.0, 60.0, 300.0])),
        ttft_slo_ms=draw(st.sampled_from([20.0, 2000.0])),
        tpot_slo_ms=draw(st.sampled_from([6.0, 18.0, 50.0])),
        priority=draw(st.sampled_from([1.0, 3.0])),
    )
    parallel = st.lists(st.integers(1, 8), min_size=2, max_size=6).map(tuple)
    rest = draw(st.lists(parallel | st.integers(1, 4), max_size=3))
    first = draw(st.integers(1, 4))
    return Program(state, [first, *rest], draw(st.integers(1, 40)))


class Waits:
    """How long each branch has waited, and its request's width while it did."""

    def __init__(self) -> None:
        self.deferred: dict[BranchState, int] = {}
        self.widest: dict[BranchState, int] = {}

    def note(self, loop: DecodeLoop, view: StepView, plan: AdmissionPlan) -> None:
        ran = set(plan.rows)
        for row, state in enumerate(loop.states):
            width = len(view.rows_of(view.request_of_row[row]))
            if row in ran:
                self.deferred[state] = self.widest[state] = 0
                continue
            self.deferred[state] = self.deferred.get(state, 0) + 1
            self.widest[state] = max(self.widest.get(state, 0), width)
            assert self.deferred[state] < self.widest[state]


@given(
    st.lists(program_strategy(), min_size=1, max_size=5),
    params_strategy(),
    model_strategy(),
    st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=100, deadline=None)
def test_a_decode_loop_keeps_invariants_1_2_3_and_5_until_it_drains(
    programs: list[Program],
    params: PolicyParams,
    model: LatencyCoefficients,
    stall_share: float,
) -> None:
    loop, waits = DecodeLoop(params, model, programs, stall_share), Waits()
    while loop.waiting or loop.states:
        if loop.prefill():
            continue
        view, plan = loop.decide()
        assert_every_request_advances(view, plan)
        assert_rows_are_valid(view, plan)
        assert_prediction_fits_budget(view, plan)
        assert_plan_is_a_function(view, plan)
        waits.note(loop, view, plan)
        loop.apply(view, plan)
    for program in programs:
        assert program.ended_ms is not None
        assert program.state.max_tokens == program.state.num_tokens - 1
