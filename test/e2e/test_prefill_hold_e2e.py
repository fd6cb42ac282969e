"""Prefill coalescing on a real server, switched on while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from forking import branch_of, counters, new_group, some_ids, together

from server import Server

HOLD_S = 1.0


@pytest.fixture
def busy_server(taper_server: Server) -> Iterator[Server]:
    """It decodes one long request for the whole test."""
    taper_server.set_policy(policy="eager", prefill_hold_s="off")
    taper_server.flush()
    long = branch_of(new_group(), some_ids("long", 12), max_new_tokens=4000)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(taper_server.post, "/generate", {**long, "rid": "long"})
        while not taper_server.state()["num_running"]:
            time.sleep(0.05)
        try:
            yield taper_server
        finally:
            taper_server.set_policy(prefill_hold_s="off")
            taper_server.post("/abort_request", {"rid": "long"})
            running.result()


def short_request(seed: str) -> dict[str, Any]:
    return branch_of(new_group(), some_ids(seed, 12), max_new_tokens=2)


def test_requests_that_come_one_by_one_are_prefilled_together(
    busy_server: Server,
) -> None:
    state = busy_server.set_policy(prefill_hold_s=HOLD_S)
    assert state["params"]["prefill_hold_s"] == HOLD_S
    began, before = time.monotonic(), counters(busy_server)
    with ThreadPoolExecutor(3) as pool:
        answers = []
        for i in range(3):
            answers.append(pool.submit(busy_server.generate, short_request(str(i))))
            time.sleep(0.2)
        held_ms = [a.result()["meta_info"]["taper"]["prefill_held_ms"] for a in answers]
    assert time.monotonic() - began >= HOLD_S
    assert held_ms == sorted(held_ms, reverse=True)
    assert 900 * HOLD_S < held_ms[0] < 3000 * HOLD_S
    assert held_ms[0] - held_ms[-1] > 200
    after = counters(busy_server)
    assert after["num_prefills_held"] - before["num_prefills_held"] == 3
    total = after["sum_prefill_held_ms"] - before["sum_prefill_held_ms"]
    assert total == pytest.approx(sum(held_ms))


def test_children_with_nothing_to_compute_are_not_held(busy_server: Server) -> None:
    group, ids = new_group(), some_ids("parent", 30)
    parent = busy_server.generate(branch_of(group, ids))
    known = [*ids, *parent["output_ids"]]
    children = [branch_of(group, known, i, 3, depth=1) for i in range(3)]
    # The parent's last token is computed by the first of them, in a prefill.
    busy_server.generate(children[0])
    busy_server.set_policy(prefill_hold_s=10)
    began = time.monotonic()
    metas = [a["meta_info"]["taper"] for a in together(busy_server, children[1:])]
    assert time.monotonic() - began < 10
    assert [meta["row_aliased"] for meta in metas] == [True, True]
    assert [meta["prefill_held_ms"] for meta in metas] == [0, 0]


@pytest.mark.parametrize("value", [0, -1, 61, "sometimes", True, None, [1]])
def test_a_bad_hold_is_refused(taper_server: Server, value: Any) -> None:
    answer = taper_server.post("/taper/policy", {"prefill_hold_s": value})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "prefill_hold_s" in message
    assert "off, auto, or above 0 and at most 60" in message
