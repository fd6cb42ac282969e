from __future__ import annotations

import asyncio

import httpx
import pytest
from demo_factories import a_state, a_step

from sglang_taper.demo.errors import DemoError
from sglang_taper.demo.steps import (
    StepLog,
    binned,
    forked_widths,
    state_of,
    step_facts,
)
from sglang_taper.frontend.client import TaperClient


def a_log(*states: dict) -> StepLog:
    log = StepLog()
    for state in states:
        log.add(state)
    return log


def test_steps_from_before_the_log_was_opened_are_not_part_of_it() -> None:
    before = a_state([a_step(1), a_step(2)], num_steps=2)
    after = a_state([a_step(1), a_step(2), a_step(3)], num_steps=3)
    assert [s["step"] for s in a_log(before, after).steps] == [3]


def test_a_step_seen_twice_counts_once_with_its_measurement() -> None:
    log = a_log(
        a_state([], num_steps=0),
        a_state([a_step(1, measured_ms=None)], num_steps=1),
        a_state([a_step(1, measured_ms=44.0)], num_steps=1),
    )
    assert [s["measured_ms"] for s in log.steps] == [44.0]


def test_prefills_of_the_log_are_those_that_were_measured() -> None:
    def passed(step: int, ms: float | None) -> dict:
        return {"step": step, "num_tokens": 30, "measured_ms": ms}

    seen = [passed(1, 11.0), passed(3, 33.0), passed(4, None)]
    before, after = a_state([], num_steps=2), a_state([a_step(3)], num_steps=3)
    assert a_log(before, {**after, "recent_prefills": seen}).prefills == [(30, 33.0)]


def test_facts_are_what_the_counters_grew_by_over_all_logs() -> None:
    logs = [
        a_log(
            a_state([], num_rows_deferred=start),
            a_state(
                [a_step(1)],
                num_rows_deferred=start + 7,
                num_predicted_steps=10,
                sum_absolute_error=0.5,
            ),
        )
        for start in (100, 300)
    ]
    facts = step_facts(logs)
    assert facts["num_rows_deferred"] == 14
    assert facts["mape"] == pytest.approx(0.05)
    assert facts["predicted_ms"] == pytest.approx(40)
    assert facts["measured_ms"] == pytest.approx(50)


def test_steps_without_a_prediction_are_in_neither_mean() -> None:
    steps = [a_step(1, predicted_ms=None, measured_ms=900.0), a_step(2)]
    facts = step_facts([a_log(a_state([]), a_state(steps))])
    assert (facts["predicted_ms"], facts["measured_ms"]) == (40, 50)


def test_without_any_prediction_there_is_no_error_to_report() -> None:
    facts = step_facts([a_log(a_state([]), a_state([]))])
    assert facts["predicted_ms"] is None
    assert facts["mape"] is None
    assert facts["rows_over_time"] == []


def test_width_leaves_out_the_one_row_of_every_other_request() -> None:
    steps = [a_step(1, num_requests=4, num_admitted=n) for n in (4, 7)]
    assert forked_widths(steps) == [1, 4]


def test_bins_cover_every_value_in_order() -> None:
    assert binned([1, 3, 5, 7], num_bins=2) == [2, 6]
    assert binned([1, 2], num_bins=5) == [1, 2]
    assert binned([], num_bins=5) == []


def answer(state: dict, status: int = 200) -> dict:
    async def ask() -> dict:
        client = TaperClient("http://server")
        client._connection._http = httpx.AsyncClient(
            base_url="http://server",
            transport=httpx.MockTransport(lambda _: httpx.Response(status, json=state)),
        )
        async with client:
            return await state_of(client)

    return asyncio.run(ask())


def test_a_server_without_policies_is_refused_with_what_to_start() -> None:
    with pytest.raises(DemoError, match=r"sglang_taper\.launch_server"):
        answer({"detail": "Not Found"}, 404)


def test_a_server_with_several_data_parallel_ranks_is_refused() -> None:
    with pytest.raises(DemoError, match="data-parallel"):
        answer({"dp_ranks": [{}, {}]})
