"""When prefills that wait may start."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.policy.prefill import (
    AUTO_TTFT_SHARE,
    WaitingPrefill,
    held_until_ms,
    hold_ends_ms,
)

TTFT_MS = 2000.0

times = st.floats(0, 10_000)
holds = st.one_of(st.just("auto"), st.floats(0.01, 10))
prefills = st.builds(
    WaitingPrefill,
    since_ms=st.one_of(st.none(), times),
    ttft_slo_ms=st.floats(1, 10_000),
    next_due_ms=st.one_of(st.none(), times),
)
queues = st.lists(prefills, max_size=5)


def waiting(since_ms: float | None = 100.0, **facts: float) -> WaitingPrefill:
    return WaitingPrefill(since_ms, TTFT_MS, **facts)


def test_a_prefill_is_held_until_it_has_waited_the_hold() -> None:
    assert held_until_ms(0.5, [waiting()], 599.0, True) == 600
    assert held_until_ms(0.5, [waiting()], 600.0, True) is None


def test_the_one_that_came_first_decides_for_all() -> None:
    queue = [waiting(300), waiting(100), waiting(200)]
    assert held_until_ms(0.5, queue, 310.0, True) == 600


def test_auto_holds_for_a_share_of_the_ttft_slo() -> None:
    assert hold_ends_ms("auto", waiting()) == 100 + AUTO_TTFT_SHARE * TTFT_MS
    impatient = WaitingPrefill(100.0, 40.0)
    assert held_until_ms("auto", [waiting(), impatient], 105.0, True) == 110


def test_auto_does_not_make_a_request_late_that_has_its_first_token() -> None:
    assert hold_ends_ms("auto", waiting(next_due_ms=130.0)) == 130
    late = waiting(next_due_ms=90.0)
    assert held_until_ms("auto", [late], 100.0, True) is None
    assert hold_ends_ms("auto", waiting(next_due_ms=9000.0)) == 600


def test_a_hold_in_seconds_is_taken_at_its_word() -> None:
    assert hold_ends_ms(0.5, waiting(next_due_ms=130.0)) == 600


def test_nothing_is_held_that_was_let_go() -> None:
    assert held_until_ms(5.0, [waiting(), waiting(None)], 100.0, True) is None


@given(queue=queues, hold=holds, now_ms=times)
def test_nothing_is_held_where_nothing_decodes(
    queue: list[WaitingPrefill], hold: str | float, now_ms: float
) -> None:
    assert held_until_ms(hold, queue, now_ms, False) is None


@given(queue=queues, now_ms=times, is_decoding=st.booleans())
def test_off_holds_nothing(
    queue: list[WaitingPrefill], now_ms: float, is_decoding: bool
) -> None:
    assert held_until_ms("off", queue, now_ms, is_decoding) is None


@given(queue=queues, hold=holds, now_ms=times)
def test_a_hold_ends_in_the_future_and_then_has_ended(
    queue: list[WaitingPrefill], hold: str | float, now_ms: float
) -> None:
    until_ms = held_until_ms(hold, queue, now_ms, True)
    if until_ms is not None:
        assert until_ms > now_ms
        assert held_until_ms(hold, queue, until_ms, True) is None


@given(queue=queues, other=prefills, hold=holds, now_ms=times)
def test_another_request_never_makes_the_others_wait_longer(
    queue: list[WaitingPrefill],
    other: WaitingPrefill,
    hold: str | float,
    now_ms: float,
) -> None:
    before = held_until_ms(hold, queue, now_ms, True)
    after = held_until_ms(hold, [*queue, other], now_ms, True)
    if queue:
        assert (after or -math.inf) <= (before or -math.inf)


@given(prefill=prefills, hold=holds)
def test_no_request_is_held_beyond_what_is_said(
    prefill: WaitingPrefill, hold: str | float
) -> None:
    ends_ms = hold_ends_ms(hold, prefill)
    if prefill.since_ms is None:
        assert ends_ms == -math.inf
    elif hold == "auto":
        longest = AUTO_TTFT_SHARE * prefill.ttft_slo_ms
        assert ends_ms <= prefill.since_ms + longest
        assert prefill.next_due_ms is None or ends_ms <= prefill.next_due_ms
    else:
        assert ends_ms == pytest.approx(prefill.since_ms + 1000 * float(hold))
