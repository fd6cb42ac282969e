"""The registry and the TAPER planner."""

from __future__ import annotations

from math import log1p

import msgspec
import pytest
from factories import (
    MODEL,
    make_request,
    make_view,
    model_strategy,
    plan,
    view_strategy,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_taper.errors import FieldError
from sglang_taper.policy import admission
from sglang_taper.policy.admission import (
    choose_baseline,
    make_policy,
    policy_names,
    register_policy,
    step_kv_tokens,
)
from sglang_taper.policy.baselines import EagerPolicy
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.types import LatencyCoefficients, StepView


def due_in(slack_ms: float, **facts: float) -> list:
    """One request whose next token is due in `slack_ms`."""
    origin_ms = 105.0 + slack_ms - facts.setdefault("tpot_slo_ms", 20.0)
    return [make_request(num_tokens=1, schedule_origin_ms=origin_ms, **facts)]


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_factories", dict(admission._factories))


def test_our_policies_are_known_by_name() -> None:
    assert policy_names() == (
        "cap",
        "eager",
        "ledger",
        "off",
        "taper",
        "taper-paper",
        "triage",
    )


@pytest.mark.usefixtures("_registry")
def test_a_registered_policy_can_be_made_by_name() -> None:
    register_policy("wide_2-b", EagerPolicy)
    assert isinstance(make_policy("wide_2-b"), EagerPolicy)


@pytest.mark.parametrize("name", ["", "Wide", "2wide", "wide open", "none"])
def test_a_policy_name_that_is_not_acceptable_is_refused(name: str) -> None:
    with pytest.raises(FieldError, match="policy="):
        register_policy(name, EagerPolicy)


@pytest.mark.usefixtures("_registry")
def test_a_name_can_be_taken_only_once() -> None:
    register_policy("eager", EagerPolicy)
    with pytest.raises(FieldError, match="not registered yet"):
        register_policy("off", EagerPolicy)


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(
        FieldError,
        match=r"'tapir'.*cap, eager, ledger, off, taper, taper-paper, triage",
    ):
        make_policy("tapir")


def test_an_unknown_utility_is_refused_with_the_known_names() -> None:
    with pytest.raises(FieldError, match=r"'square'.*linear, concave, priority"):
        plan(make_view(), utility="square")


def test_rows_are_added_up_to_and_including_the_budget() -> None:
    # S0 is 11 ms; rho 0.5 of the 4 ms beyond it is room for exactly two rows more.
    answer = plan(make_view((6,), due_in(15.0, tpot_slo_ms=11.0)), rho=0.5)
    assert (answer.rows, answer.reason) == ([0, 1, 2], "budget")
    assert (answer.baseline_ms, answer.budget_ms, answer.predicted_ms) == (11, 13, 13)
    assert answer.min_slack_ms == 15.0


def test_stalls_shrink_the_budget_but_never_below_s0() -> None:
    view = make_view((6,), due_in(15.0, tpot_slo_ms=11.0), stall_share=0.2)
    assert plan(view, rho=1.0).budget_ms == pytest.approx(12.0)
    late = plan(view, rho=0.0)
    assert (late.rows, late.budget_ms) == ([0], 11.0)


def test_a_step_as_long_as_the_tpot_of_who_is_urgent_needs_no_share_of_the_slack() -> (
    None
):
    view = make_view((9,), due_in(30.0, tpot_slo_ms=14.0))
    assert plan(view, rho=0.0).budget_ms == 14.0
    assert len(plan(view, rho=0.0).rows) == 4
    # What was saved is still rationed.
    assert plan(view, rho=0.5).budget_ms == 11.0 + 0.5 * 19.0
    soon = make_view((9,), due_in(12.0, tpot_slo_ms=14.0))
    assert plan(soon, rho=0.0).budget_ms == 12.0


def test_that_step_is_shorter_by_what_the_model_errs_and_by_what_prefills_take() -> (
    None
):
    model = msgspec.structs.replace(MODEL, error=0.1)
    urgent = due_in(60.0, tpot_slo_ms=40.0)
    view = make_view((30,), urgent, model=model, stall_share=0.25)
    assert plan(view, rho=0.0).budget_ms == pytest.approx(0.75 * 0.9 * 40.0)


def test_with_progress_deadlines_rho_rations_all_slack() -> None:
    view = make_view((9,), [make_request(last_progress_ms=100.0, tpot_slo_ms=20.0)])
    answer = plan(view, rho=0.0, deadline="progress")
    assert (answer.budget_ms, answer.min_slack_ms) == (11.0, 15.0)


def test_without_slack_only_the_baseline_runs() -> None:
    answer = plan(make_view((6,), due_in(3.0)), rho=1.0)
    assert (answer.rows, answer.reason) == ([0], "budget")


def test_when_nobody_can_be_protected_everything_runs() -> None:
    answer = plan(make_view((6,), due_in(-50.0, tpot_slo_ms=1.0)))
    assert (len(answer.rows), answer.reason) == (6, "all")
    assert answer.budget_ms is None
    assert answer.min_slack_ms is None


def test_everything_fits_when_slack_is_large() -> None:
    answer = plan(make_view((6,), due_in(500.0)))
    assert (len(answer.rows), answer.reason) == (6, "all")
    assert answer.predicted_ms == 16.0


def test_a_model_that_is_not_trusted_runs_the_baseline_and_says_so() -> None:
    model = msgspec.structs.replace(MODEL, trusted=False)
    answer = plan(make_view((3, 1), due_in(500.0) * 2, model=model))
    assert (answer.rows, answer.reason) == ([0, 3], "fallback")
    assert answer.baseline_ms is None
    assert plan(make_view((1, 1), due_in(500.0) * 2, model=model)).reason == "all"


def test_short_contexts_are_admitted_first_when_tokens_cost_time() -> None:
    model = LatencyCoefficients(10.0, 0.0, 0.01, trusted=True)
    view = make_view(
        (4,), due_in(14.0), context_tokens=[100, 300, 80, 200], model=model
    )
    answer = plan(view, rho=1.0)
    assert answer.rows == [0, 2, 3]
    assert answer.predicted_ms == pytest.approx(13.8)


def test_filling_stops_at_the_first_row_that_does_not_fit() -> None:
    model = LatencyCoefficients(10.0, 0.0, 0.01, trusted=True)
    requests = due_in(14.0, priority=9.0) + due_in(14.0)
    view = make_view((2, 2), requests, context_tokens=[100, 400, 100, 100], model=model)
    # The precious long row comes first and is too long; the cheap one would fit.
    assert plan(view, rho=1.0, utility="priority").rows == [0, 2]
    assert plan(view, rho=1.0, utility="linear").rows == [0, 2, 3]


def test_a_shared_prefix_read_once_makes_siblings_cheap() -> None:
    model = LatencyCoefficients(10.0, 0.0, 0.01, shared_read_once=True, trusted=True)
    view = make_view(
        (4,),
        due_in(13.0),
        context_tokens=[200] * 4,
        shared_tokens=[190] * 4,
        model=model,
    )
    answer = plan(view, rho=1.0)
    assert answer.reason == "all"
    assert answer.predicted_ms == pytest.approx(10 + 0.01 * (190 + 4 * 10))
    each = msgspec.structs.replace(model, shared_read_once=False)
    again = msgspec.structs.replace(view, model=each)
    assert plan(again, rho=1.0).rows == [0]


def test_a_captured_graph_size_is_filled_for_free_and_not_crossed() -> None:
    model = LatencyCoefficients(0.0, 1.0, 0.0, False, (4, 8), True)
    answer = plan(make_view((8,), due_in(7.0), model=model), rho=1.0)
    assert (answer.rows, answer.predicted_ms) == ([0, 1, 2, 3], 4.0)


def test_concave_utility_spreads_rows_over_requests() -> None:
    view = make_view((4, 4), due_in(16.0) * 2)
    assert plan(view, rho=1.0, utility="linear").rows == [0, 1, 2, 3, 4, 5]
    assert plan(view, rho=1.0, utility="concave").rows == [0, 1, 2, 4, 5, 6]


def test_priority_utility_prefers_the_more_important_request() -> None:
    view = make_view((3, 3), due_in(14.0) + due_in(14.0, priority=2.0))
    assert plan(view, rho=1.0, utility="priority").rows == [0, 3, 4, 5]


@pytest.mark.parametrize(
    ("utility", "rows"),
    [("age", [0, 2, 3, 5]), ("need", [0, 1, 2, 5]), ("finishing", [0, 2, 5, 6])],
)
def test_an_ordering_admits_whole_requests_first(utility: str, rows: list[int]) -> None:
    requests = [
        *due_in(50.0, arrival_ms=2.0, remaining_tokens=20),
        *due_in(14.0, arrival_ms=1.0, remaining_tokens=30),
        *due_in(50.0, arrival_ms=3.0, remaining_tokens=10),
    ]
    assert plan(make_view((2, 3, 2), requests), rho=1.0, utility=utility).rows == rows


def test_equally_good_rows_go_longest_waiting_first() -> None:
    view = make_view((4,), due_in(12.0), last_run_step=[40, 49, 48, 49])
    assert plan(view, rho=1.0).rows == [0, 2]


def greedy_rows(view: StepView, budget_ms: float) -> list[int]:
    """The planner's rule taken literally: always the best row next, while it fits."""
    model, rows = view.model, choose_baseline(view)
    shared: dict[int, int] = {}
    for row in rows:
        owner = view.request_of_row[row]
        shared[owner] = max(shared.get(owner, 0), view.shared_tokens[row])
    tokens = step_kv_tokens(view, rows)

    def added(row: int) -> int:
        known = min(view.shared_tokens[row], shared[view.request_of_row[row]])
        return view.context_tokens[row] - (known if model.shared_read_once else 0)

    def price(row: int) -> tuple[float, ...]:
        owner = view.request_of_row[row]
        width = sum(view.request_of_row[other] == owner for other in rows)
        ms = model.b_ms_per_row + model.c_ms_per_token * added(row)
        first = {
            "linear": ms,
            "concave": ms / log1p(1 / (width + 1)),
            "priority": ms / view.requests[owner].priority,
            "age": view.requests[owner].arrival_ms,
            "need": view.request_of_row.count(owner),
            "finishing": view.requests[owner].remaining_tokens,
        }[view.params.utility]
        cost = added(row) if model.c_ms_per_token else 0
        waited = (view.last_run_step[row], view.output_tokens[row], row)
        return first, cost, *waited

    while candidates := set(range(view.num_rows)).difference(rows):
        best = min(candidates, key=price)
        if predict_ms(model, len(rows) + 1, tokens + added(best)) > budget_ms:
            break
        rows.append(best)
        tokens += added(best)
    return sorted(rows)


@given(view_strategy(), model_strategy(), st.floats(0, 150))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_what_literal_greedy_choice_gives(
    view: StepView, model: LatencyCoefficients, slack_ms: float
) -> None:
    assume(model.trusted)
    soon = make_request(num_tokens=1, schedule_origin_ms=85.0 + slack_ms)
    requests = [
        msgspec.structs.replace(soon, priority=r.priority) for r in view.requests
    ]
    changed = msgspec.structs.replace(view, requests=requests, model=model)
    answer = plan(changed)
    if answer.budget_ms is not None:
        seen = msgspec.structs.replace(
            changed, params=msgspec.structs.replace(view.params, policy="taper")
        )
        assert answer.rows == greedy_rows(seen, answer.budget_ms)
