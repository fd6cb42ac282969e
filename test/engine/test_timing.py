"""Step durations from launches and results."""

from __future__ import annotations

import pytest

from sglang_taper.engine.counters import Counters, PrefillRecord
from sglang_taper.engine.timing import LaunchedStep, StepTimer


def decode(at_ms: float, rows: int = 4) -> LaunchedStep:
    return LaunchedStep(launched_ms=at_ms, num_rows=rows, kv_tokens=100)


def prefill(at_ms: float) -> LaunchedStep:
    return LaunchedStep(launched_ms=at_ms, num_rows=0, kv_tokens=0)


def test_a_synchronous_step_lasts_until_the_next_launch() -> None:
    timer = StepTimer(asynchronous=False)
    assert timer.launched(decode(10), after_idle=True) is None
    closed = timer.launched(decode(35), after_idle=False)
    assert closed is not None
    assert (closed.step_ms, closed.num_rows) == (25, 4)


def test_a_prefill_after_a_step_ends_it_too_but_is_no_step() -> None:
    timer = StepTimer(asynchronous=False)
    timer.launched(decode(0), after_idle=True)
    closed = timer.launched(prefill(20), after_idle=False)
    assert closed is not None
    assert closed.step_ms == 20
    assert timer.launched(decode(90), after_idle=False) is None


def test_a_prefill_with_a_record_is_measured_in_it() -> None:
    timer, counters = StepTimer(asynchronous=False), Counters()
    step = prefill(20)
    step.prefill = counters.prefilled(7, 300)
    timer.launched(step, after_idle=True)
    assert step.prefill.measured_ms is None
    timer.launched(decode(90), after_idle=False)
    assert list(counters.recent_prefills) == [PrefillRecord(7, 300, 70)]


def test_a_step_before_an_idle_gap_is_not_measured() -> None:
    timer = StepTimer(asynchronous=False)
    timer.launched(decode(0), after_idle=True)
    assert timer.launched(decode(5000), after_idle=True) is None
    timer.forget_open_step()
    assert timer.launched(decode(9000), after_idle=False) is None


def test_an_asynchronous_step_lasts_from_the_previous_result_to_its_own() -> None:
    timer = StepTimer(asynchronous=True)
    first, second = decode(0), decode(2)
    timer.launched(first, after_idle=True)
    timer.launched(second, after_idle=False)
    one, two = timer.result_ready(first, 20), timer.result_ready(second, 45)
    assert one is not None
    assert two is not None
    assert (one.step_ms, two.step_ms) == (20, 25)


def test_the_stall_share_follows_prefills_and_forgets_them() -> None:
    timer = StepTimer(asynchronous=False)
    now = 0.0
    for _ in range(400):
        timer.launched(prefill(now), after_idle=False)
        timer.launched(decode(now + 25), after_idle=False)
        now += 100
    assert timer.stalls.share == pytest.approx(0.25, abs=0.02)
    for _ in range(400):
        timer.launched(decode(now), after_idle=False)
        now += 100
    assert timer.stalls.share < 0.02


def test_the_mean_stall_is_the_first_one_and_then_follows_slowly() -> None:
    timer = StepTimer(asynchronous=False)
    for at_ms, batch in ((0, prefill), (40, decode), (60, prefill), (132, decode)):
        timer.launched(batch(at_ms), after_idle=False)
    assert timer.stalls.mean_ms == pytest.approx(40 + (72 - 40) / 32)
