"""Who waits for a sibling, what of the queue is tried, who is retracted first."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.policy.forks import (
    Prompt,
    Room,
    SharedWork,
    Unit,
    num_units_to_try,
    retraction_order,
)


def prompt(
    *tokens: int, matched: int = 0, node: int = 0, salt: object = None
) -> Prompt:
    return Prompt(array("q", tokens), node, matched, len(tokens) - 1, salt)


# -- siblings that would compute the same


def test_a_sibling_with_the_same_next_token_waits_for_the_first() -> None:
    work = SharedWork(page_size=1)
    first, second = prompt(1, 2, 3), prompt(1, 2, 9)
    assert work.begun_by(first) is None
    work.begin(first)
    assert work.begun_by(second) is first


@pytest.mark.parametrize(
    "other",
    [
        prompt(8, 2, 3),
        prompt(1, 2, 3, matched=1),
        prompt(1, 2, 3, node=5),
        prompt(1, 2, 3, salt="other"),
        prompt(1),
    ],
    ids=["other token", "other depth", "other node", "other namespace", "one token"],
)
def test_what_is_not_the_same_work_does_not_wait(other: Prompt) -> None:
    work = SharedWork(page_size=1)
    work.begin(prompt(1, 2, 3))
    assert work.begun_by(other) is None


def test_a_prompt_that_lacks_only_its_last_token_waits_for_nobody() -> None:
    work = SharedWork(page_size=1)
    work.begin(prompt(1, 2, 3, matched=2))
    assert work.begun_by(prompt(1, 2, 3, matched=2)) is None


def test_logprobs_of_the_prompt_limit_what_is_worth_waiting_for() -> None:
    work = SharedWork(page_size=1)
    work.begin(prompt(1, 2, 3))
    wants_all = Prompt(array("q", (1, 2, 3)), 0, 0, limit=0)
    assert work.begun_by(wants_all) is None


def test_whole_pages_are_compared_as_a_whole() -> None:
    work = SharedWork(page_size=4)
    first = prompt(1, 2, 3, 4, 5, 6)
    work.begin(first)
    assert work.begun_by(prompt(1, 2, 3, 4, 9, 9)) is first
    assert work.begun_by(prompt(1, 2, 3, 9, 9, 9)) is None


def test_the_rest_of_a_page_is_shared_by_prompts_that_end_in_it() -> None:
    work = SharedWork(page_size=4)
    first = prompt(1, 2, 3, 4, 5)
    work.begin(first)
    short = prompt(1, 2, 3)
    assert work.begun_by(short) is first
    assert work.is_partial(short)
    assert not work.is_partial(first)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=8),
    page=st.sampled_from((1, 2, 4)),
)
def test_who_waits_shares_at_least_a_page_or_all_it_needs(
    prompts: list[list[int]], page: int
) -> None:
    work = SharedWork(page)
    for tokens in prompts:
        mine = prompt(*tokens)
        first = work.begun_by(mine)
        if first is None:
            work.begin(mine)
            continue
        length = min(page, len(tokens) - 1)
        assert length >= 1
        assert list(first.tokens[:length]) == tokens[:length]


# -- a fork is admitted whole, or waits whole

FORK = Unit(num_rows=8, num_tokens=400, total_tokens=500)
SINGLE = Unit(num_rows=1, num_tokens=900, total_tokens=900)


def room(tokens: int = 1000, rows: int = 16) -> Room:
    return Room(tokens, rows, pool_tokens=1000, pool_rows=16)


def test_a_fork_that_fits_is_tried() -> None:
    assert num_units_to_try([FORK, FORK], room(), busy=True) == 2


def test_a_fork_that_does_not_fit_waits_whole_and_so_does_what_follows() -> None:
    assert num_units_to_try([FORK, SINGLE], room(tokens=400), busy=True) == 0
    assert num_units_to_try([FORK, FORK, FORK], room(), busy=True) == 2


def test_rows_count_like_tokens() -> None:
    assert num_units_to_try([FORK], room(rows=7), busy=True) == 0


def test_a_fork_larger_than_the_pool_goes_in_waves() -> None:
    large = Unit(num_rows=8, num_tokens=900, total_tokens=1000)
    wide = Unit(num_rows=17, num_tokens=100, total_tokens=100)
    assert num_units_to_try([large, wide], room(tokens=50), busy=True) == 2


def test_when_nothing_runs_the_first_is_tried_whatever_its_size() -> None:
    assert num_units_to_try([FORK, FORK], room(tokens=100), busy=False) == 1


def test_what_stands_alone_is_left_to_the_engine_and_still_takes_its_room() -> None:
    assert num_units_to_try([SINGLE], room(tokens=10), busy=True) == 1
    assert num_units_to_try([SINGLE, FORK], room(), busy=True) == 1


UNITS = st.lists(
    st.builds(Unit, st.integers(1, 20), st.integers(1, 1200), st.integers(1, 1200)),
    max_size=6,
)


@given(units=UNITS, tokens=st.integers(0, 1000), rows=st.integers(0, 16))
def test_something_is_always_tried_when_nothing_runs(
    units: list[Unit], tokens: int, rows: int
) -> None:
    number = num_units_to_try(units, room(tokens, rows), busy=False)
    assert min(1, len(units)) <= number <= len(units)


@given(units=UNITS, tokens=st.integers(0, 999), more=st.integers(0, 500))
def test_more_room_never_admits_less(units: list[Unit], tokens: int, more: int) -> None:
    little = num_units_to_try(units, room(tokens), busy=True)
    assert num_units_to_try(units, room(tokens + more), busy=True) >= little


# -- retraction

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12
)


@given(rows=ROWS, data=st.data())
def test_the_order_keeps_every_row_and_each_requests_best_one_longest(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    requests = [request for request, _ in rows]
    order = data.draw(st.permutations(range(len(rows))))
    kept = retraction_order(order, requests, [None] * len(rows))
    assert sorted(kept) == sorted(order)
    num_requests = len(set(requests))
    assert len({requests[row] for row in kept[:num_requests]}) == num_requests
    for request in set(requests):
        mine = [row for row in order if requests[row] == request]
        assert [row for row in kept if requests[row] == request] == mine


@given(rows=ROWS)
def test_a_request_loses_its_last_row_only_when_nobody_has_several(
    rows: list[tuple[int, int]],
) -> None:
    requests = [request for request, _ in rows]
    kept = retraction_order(range(len(rows)), requests, [None] * len(rows))
    running = Counter(requests)
    for row in reversed(kept):
        if running[requests[row]] == 1:
            assert max(running.values()) == 1
        running[requests[row]] -= 1


@given(rows=ROWS)
def test_priorities_come_first(rows: list[tuple[int, int]]) -> None:
    rows = sorted(rows, key=lambda row: row[1])
    requests, priorities = [r for r, _ in rows], [p for _, p in rows]
    kept = retraction_order(range(len(rows)), requests, priorities)
    assert [priorities[row] for row in kept] == priorities


def test_requests_of_one_row_each_stay_in_sglangs_order() -> None:
    order = [2, 0, 1]
    assert retraction_order(order, ["a", "b", "c"], [None] * 3) == order
