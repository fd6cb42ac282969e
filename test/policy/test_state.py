"""Bookkeeping between steps and the views made from it."""

from __future__ import annotations

import pytest
from factories import MODEL

from sglang_taper.policy.slack import deadline_ms
from sglang_taper.policy.state import (
    BranchState,
    RequestState,
    StepBuilder,
    record_step,
)
from sglang_taper.policy.types import PolicyParams, StepView


def started(first_ms: float = 100.0) -> RequestState:
    """Arrived at 0, first token at `first_ms`, in decode; TTFT 200, TPOT 10 ms."""
    request = RequestState("g", 0.0, 200.0, 10.0)
    request.record_tokens(first_ms)
    request.enter_decode(first_ms)
    return request


def build(builder: StepBuilder, states: list[BranchState], step: int = 1) -> StepView:
    return builder.build(
        states,
        [100 + state.output_tokens for state in states],
        [],
        now_ms=float(step),
        step=step,
        params=PolicyParams(),
        model=MODEL,
        num_waiting_prefill=3,
        stall_share=0.25,
    )


def test_first_token_starts_the_schedule() -> None:
    request = started(100.0)
    assert (request.first_token_ms, request.schedule_origin_ms) == (100.0, 100.0)
    assert (request.last_progress_ms, request.num_tokens) == (100.0, 1)
    assert request.deadline_misses == 0


@pytest.mark.parametrize(("first_ms", "misses"), [(200.0, 0), (201.0, 1)])
def test_a_late_first_token_is_a_deadline_miss(first_ms: float, misses: int) -> None:
    assert started(first_ms).deadline_misses == misses


@pytest.mark.parametrize("deadline", ["schedule", "progress"])
@pytest.mark.parametrize(("now_ms", "misses"), [(110.0, 0), (110.5, 1)])
def test_a_token_after_its_deadline_is_a_miss(
    deadline: str, now_ms: float, misses: int
) -> None:
    request = started(100.0)
    request.record_tokens(now_ms, 1, deadline)
    assert request.deadline_misses == misses


def test_tokens_of_one_step_are_judged_one_by_one_on_a_schedule() -> None:
    request = started(100.0)
    # Due at 110, 120, 130, 140: the first two are late at 125.
    request.record_tokens(125.0, 4, "schedule")
    assert (request.num_tokens, request.deadline_misses) == (5, 2)


def test_a_late_step_is_one_miss_when_its_first_token_restarts_the_clock() -> None:
    request = started(100.0)
    request.record_tokens(125.0, 4, "progress")
    assert request.deadline_misses == 1


def test_recording_no_tokens_changes_nothing() -> None:
    request = started(100.0)
    request.record_tokens(500.0, 0)
    assert (request.num_tokens, request.last_progress_ms) == (1, 100.0)


def test_time_away_from_decode_is_not_held_against_a_request() -> None:
    request = started(100.0)
    request.record_tokens(110.0)
    before = deadline_ms(request, "schedule") - 115.0
    request.leave_decode(115.0)
    request.enter_decode(615.0)
    assert deadline_ms(request, "schedule") - 615.0 == before
    assert deadline_ms(request, "progress") == 625.0


def test_the_clock_never_runs_backwards_on_re_entry() -> None:
    request = started(100.0)
    request.leave_decode(120.0)
    request.record_tokens(130.0)
    request.enter_decode(125.0)
    assert request.last_progress_ms == 130.0


def test_waiting_for_the_first_token_is_not_time_away() -> None:
    request = RequestState("g", 0.0, 200.0, 10.0)
    request.enter_decode(10.0)
    request.leave_decode(20.0)
    request.record_tokens(100.0)
    request.enter_decode(130.0)
    assert request.schedule_origin_ms == 130.0
    assert request.first_token_ms == 100.0


def test_first_entry_into_decode_does_not_move_the_schedule() -> None:
    request = RequestState("g", 0.0, 200.0, 10.0)
    request.record_tokens(100.0)
    request.enter_decode(150.0)
    assert (request.schedule_origin_ms, request.last_progress_ms) == (100.0, 100.0)


def test_tokens_of_the_next_stages_prefill_are_not_judged() -> None:
    request = started(100.0)
    request.leave_decode(100.0)
    request.record_tokens(900.0, 3)
    assert (request.num_tokens, request.deadline_misses) == (4, 0)


def test_a_step_is_counted_for_rows_that_ran_and_rows_that_did_not() -> None:
    states = [BranchState(started(), branch, 0, 9) for branch in range(3)]
    assert record_step(states, [0, 2], step=7) == {1}
    assert record_step(states, [0, 1, 2], step=8) == set()
    assert [s.steps_run for s in states] == [2, 1, 2]
    assert [s.steps_deferred for s in states] == [0, 1, 0]
    record_step(states, [1], step=9)
    assert [s.last_run_step for s in states] == [8, 9, 8]


def test_view_lists_requests_in_order_of_first_row() -> None:
    left, right = started(), started()
    owners = (right, left, right, left)
    states = [BranchState(owner, i, 40, 9) for i, owner in enumerate(owners)]
    view = build(StepBuilder(), states)
    assert view.request_of_row == [0, 1, 0, 1]
    assert [view.rows_of(0), view.rows_of(1)] == [[0, 2], [1, 3]]
    assert view.branch == [0, 1, 2, 3]


def test_view_shows_the_state_of_every_request_and_row() -> None:
    request = RequestState("g7", 5.0, 200.0, 10.0, priority=3.0)
    request.record_tokens(90.0)
    request.leave_decode(95.0)
    request.enter_decode(97.0)
    state = BranchState(request, 2, 40, 9, output_tokens=4, last_run_step=11)
    view = build(StepBuilder(), [state], step=12)
    shown = view.requests[0]
    assert (shown.group, shown.arrival_ms, shown.priority) == ("g7", 5.0, 3.0)
    assert (shown.first_token_ms, shown.schedule_origin_ms) == (90.0, 92.0)
    assert (shown.last_progress_ms, shown.num_tokens) == (97.0, 1)
    assert (shown.ttft_slo_ms, shown.tpot_slo_ms) == (200.0, 10.0)
    row = view.row(0)
    assert (row.branch, row.shared_tokens, row.context_tokens) == (2, 40, 104)
    assert (row.output_tokens, row.remaining_tokens, row.last_run_step) == (4, 5, 11)
    assert (view.num_waiting_prefill, view.stall_share) == (3, 0.25)


def test_view_follows_tokens_and_batch_changes() -> None:
    request, builder = started(), StepBuilder()
    states = [BranchState(request, branch, 0, 9) for branch in range(3)]
    first = build(builder, states)
    states[1].output_tokens += 1
    states[1].shared_tokens = 30
    record_step(states, [1], step=1)
    second = build(builder, states, step=2)
    assert (first.output_tokens, second.output_tokens) == ([0, 0, 0], [0, 1, 0])
    assert second.last_run_step == [-1, 1, -1]
    assert second.shared_tokens == [0, 30, 0]
    del states[0]
    third = build(builder, states, step=3)
    assert (second.branch, third.branch) == ([0, 1, 2], [1, 2])
    assert third.rows_of(0) == [0, 1]


def test_view_follows_a_batch_that_changes_but_keeps_its_size() -> None:
    builder, states = StepBuilder(), [BranchState(started(), 0, 0, 9) for _ in "ab"]
    build(builder, states)
    states[0] = BranchState(states[1].request, 1, 0, 9)
    view = build(builder, states, step=2)
    assert (view.branch, view.request_of_row) == ([1, 0], [0, 0])


def test_remaining_tokens_of_a_request_are_those_its_living_branches_may_produce() -> (
    None
):
    request, builder = started(), StepBuilder()
    request.num_tokens = 0
    states = [BranchState(request, branch, 0, 10) for branch in range(2)]
    for state in states:
        state.output_tokens = 4
    request.record_tokens(105.0, 8)
    assert build(builder, states).requests[0].remaining_tokens == 12
    states.pop().end()
    view = build(builder, states)
    assert view.requests[0].remaining_tokens == view.remaining_tokens[0] == 6
