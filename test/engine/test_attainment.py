"""Requests that have ended, against their SLOs."""

from __future__ import annotations

import pytest

from sglang_taper.engine.attainment import WINDOW_S, Attainment, judge
from sglang_taper.engine.counters import Counters
from sglang_taper.policy.state import RequestState

TTL_MS = 5000.0


def request(
    ttft_ms: float = 100.0, tpot_ms: float = 10.0, num_tokens: int = 11
) -> RequestState:
    """SLOs of 200 and 20 ms; arrived at 0."""
    state = RequestState("g", 0.0, 200.0, 20.0)
    state.record_tokens(ttft_ms)
    state.record_tokens(ttft_ms + (num_tokens - 1) * tpot_ms, num_tokens - 1)
    return state


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def attainment(counters: Counters) -> Attainment:
    return Attainment(counters, TTL_MS)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "is_good"),
    [(200.0, 20.0, True), (201.0, 1.0, False), (1.0, 20.5, False)],
)
def test_a_request_is_good_when_ttft_and_tpot_are_within_its_slos(
    ttft_ms: float, tpot_ms: float, is_good: bool
) -> None:
    assert judge(request(ttft_ms, tpot_ms), 500.0).is_good is is_good


def test_one_token_has_no_tpot_to_miss() -> None:
    assert judge(request(num_tokens=1), 500.0).is_good


def test_a_request_without_a_group_counts_when_it_ends(
    attainment: Attainment, counters: Counters
) -> None:
    attainment.ended(request(), 300.0, may_go_on=False)
    attainment.ended(request(tpot_ms=30.0), 300.0, may_go_on=False)
    assert (counters.num_requests_ended, counters.num_requests_in_slo) == (2, 1)
    assert (counters.num_tokens_ended, counters.num_tokens_in_slo) == (22, 11)


def test_a_request_that_may_go_on_counts_once_it_can_not_any_more(
    attainment: Attainment, counters: Counters
) -> None:
    state = request()
    attainment.ended(state, 300.0, may_go_on=True)
    attainment.resumed(state)
    attainment.settle(300.0 + 2 * TTL_MS)
    assert counters.num_requests_ended == 0
    attainment.ended(state, 400.0, may_go_on=True)
    attainment.settle(400.0 + TTL_MS)
    assert counters.num_requests_ended == 0
    attainment.settle(401.0 + TTL_MS)
    assert counters.num_requests_ended == 1


def test_a_request_that_never_got_a_token_does_not_count(
    attainment: Attainment, counters: Counters
) -> None:
    attainment.ended(RequestState("g", 0.0, 200.0, 20.0), 9.0, may_go_on=False)
    assert counters.num_requests_ended == 0
    assert attainment.in_window(10.0)["slo_attainment"] is None


def test_the_window_holds_what_ended_lately_at_once(attainment: Attainment) -> None:
    attainment.ended(request(), 300.0, may_go_on=True)
    attainment.ended(request(tpot_ms=30.0), 400.0, may_go_on=False)
    window = attainment.in_window(500.0)
    assert (window["num_requests_ended"], window["num_requests_in_slo"]) == (2, 1)
    assert window["slo_attainment"] == 0.5
    assert window["token_goodput"] == pytest.approx(11 / WINDOW_S)
    assert attainment.in_window(401.0 + 1000 * WINDOW_S)["num_requests_ended"] == 0
