"""Closed and open loops, and which of their requests count."""

from __future__ import annotations

import asyncio
import time

import pytest
from goodput_lib.execute import Seen
from goodput_lib.load import Job, Played, counted, outcomes_of, play
from goodput_lib.results import achieved
from goodput_lib.stream import now_ms


def test_a_closed_loop_keeps_so_many_in_flight_and_no_more() -> None:
    in_flight, most = 0, 0

    async def send() -> Seen:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        seen = Seen(False, 1, now_ms())
        await asyncio.sleep(0.01)
        in_flight -= 1
        seen.ended_ms = seen.closed_ms = now_ms()
        return seen

    played = asyncio.run(play([Job(0.0, send)] * 9, concurrency=3))
    assert most == 3
    assert len(played.seen) == 9
    sent = [seen.sent_ms for seen in played.seen]
    assert sent == sorted(sent)


def test_an_open_loop_sends_when_requests_arrive_whatever_is_in_flight() -> None:
    async def send() -> Seen:
        seen = Seen(False, 1, now_ms())
        await asyncio.sleep(0.3)
        seen.closed_ms = now_ms()
        return seen

    jobs = [Job(100.0 * i, send) for i in range(3)]
    began = time.perf_counter()
    played = asyncio.run(play(jobs, concurrency=None))
    assert time.perf_counter() - began < 0.9
    times = [seen.sent_ms - played.began_ms for seen in played.seen]
    assert times == pytest.approx([0, 100, 200], abs=60)


def seen_at(sent_ms: float, closed_ms: float, failed: bool = False) -> Seen:
    return Seen(
        is_decomposable=False,
        num_prompt_tokens=4,
        sent_ms=sent_ms,
        first_token_ms=sent_ms + 1,
        ended_ms=None if failed else closed_ms,
        closed_ms=closed_ms,
        num_tokens=10,
        num_critical_tokens=10,
        error="broken" if failed else None,
    )


def test_in_a_closed_loop_only_the_time_with_all_places_taken_counts() -> None:
    seen = [
        seen_at(0, 100),
        seen_at(0, 250, failed=True),
        seen_at(100, 900),
        seen_at(1000, 1500),
    ]
    found, duration_s = counted(Played(seen, is_closed=True))
    assert [one.closed_ms for one in found] == [250, 900]
    assert duration_s == pytest.approx(0.8)


def test_failures_count_in_an_open_loop_as_well() -> None:
    seen = [seen_at(0, 100), seen_at(500, 2000, failed=True)]
    found, duration_s = counted(Played(seen, is_closed=False))
    assert len(found) == 2
    assert duration_s == pytest.approx(2.0)


def test_a_victim_is_a_serial_request_that_ran_beside_a_fork() -> None:
    forking, beside, after = seen_at(0, 300), seen_at(100, 200), seen_at(400, 500)
    forking.is_decomposable = True
    forking.forks_ms = [(50, 250)]
    everyone = [forking, beside, after]
    victims = [outcome.is_victim for outcome in outcomes_of(everyone, everyone)]
    assert victims == [False, True, False]


@pytest.mark.parametrize(
    ("history", "rate"),
    [
        ([(1, 1.0), (2, 0.97)], 2),
        ([(1, 1.0), (2, 0.90)], 1.5),
        ([(1, 0.5), (2, 1.0)], None),
        # What recovers at a higher rate by chance has been lost before.
        ([(1, 1.0), (2, 0.9), (3, 0.99)], 1.5),
    ],
)
def test_the_rate_at_attainment_is_where_it_is_first_lost(
    history: list[tuple[float, float]], rate: float | None
) -> None:
    assert achieved(history, 0.95) == (None if rate is None else pytest.approx(rate))
