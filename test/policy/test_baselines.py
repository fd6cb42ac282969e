"""The baseline step and the policies off, eager and cap."""

from __future__ import annotations

import pytest
from factories import make_request, make_view, plan

from sglang_taper.policy.baselines import choose_baseline, waiting_order


def test_baseline_takes_the_longest_waiting_row_of_each_request() -> None:
    view = make_view((3, 2), last_run_step=[49, 47, 48, 40, 49])
    assert choose_baseline(view) == [1, 3]


def test_among_rows_that_waited_equally_the_one_with_least_progress_goes_first() -> (
    None
):
    view = make_view((3,), output_tokens=[5, 6, 4])
    assert choose_baseline(view) == [2]


def test_rows_alike_in_all_else_go_in_batch_order() -> None:
    assert choose_baseline(make_view((3, 2))) == [0, 3]
    assert waiting_order(make_view((3, 2))) == [0, 1, 2, 3, 4]


def test_rows_of_a_request_need_not_be_neighbours() -> None:
    view = make_view((2, 2), request_of_row=[0, 1, 0, 1], last_run_step=[9, 9, 8, 7])
    assert choose_baseline(view) == [2, 3]


def test_a_row_that_must_run_is_its_requests_baseline_row() -> None:
    view = make_view((3, 2), last_run_step=[49, 47, 48, 40, 49], must_run=[2])
    assert choose_baseline(view) == [2, 3]


def test_all_rows_that_must_run_are_in_the_baseline() -> None:
    assert choose_baseline(make_view((4, 2), must_run=[1, 3])) == [1, 3, 4]


def test_a_finished_row_that_must_run_does_not_stand_in_for_its_request() -> None:
    view = make_view(
        (3,),
        last_run_step=[40, 48, 47],
        remaining_tokens=[0, 5, 5],
        must_run=[0],
    )
    assert choose_baseline(view) == [0, 2]


def test_a_request_with_only_finished_rows_still_gets_one_row() -> None:
    view = make_view((2,), remaining_tokens=[0, 0], must_run=[0, 1])
    assert choose_baseline(view) == [0, 1]


def test_off_runs_the_baseline_and_says_so() -> None:
    answer = plan(make_view((3, 2)), "off")
    assert (answer.rows, answer.reason) == ([0, 3], "baseline")


@pytest.mark.parametrize("policy", ["off", "eager", "cap", "taper"])
def test_serial_requests_all_run_under_every_policy(policy: str) -> None:
    answer = plan(make_view((1, 1, 1)), policy)
    assert (answer.rows, answer.reason) == ([0, 1, 2], "all")


def test_eager_runs_every_row_however_late_everybody_is() -> None:
    view = make_view((3, 2), [make_request(num_tokens=1)] * 2)
    assert plan(view, "eager").rows == [0, 1, 2, 3, 4]


def test_cap_runs_the_longest_waiting_rows_of_each_request() -> None:
    view = make_view((4, 1, 2), last_run_step=[49, 40, 41, 42, 9, 9, 9])
    answer = plan(view, "cap", cap=2)
    assert (answer.rows, answer.reason) == ([1, 2, 4, 5, 6], "cap")


def test_cap_counts_rows_that_must_run_and_never_drops_one() -> None:
    view = make_view((4,), must_run=[1, 2, 3])
    assert plan(view, "cap", cap=2).rows == [1, 2, 3]
    assert plan(make_view((4,), must_run=[3]), "cap", cap=2).rows == [0, 3]


def test_a_cap_as_wide_as_the_widest_request_defers_nothing() -> None:
    assert plan(make_view((4, 2)), "cap", cap=4).reason == "all"
