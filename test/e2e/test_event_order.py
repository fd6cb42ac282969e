"""Events of several clients in any order, against a real server.

One thread has all connections open, so hypothesis decides what comes after what: a
stream is read a bit further, closed, its group aborted, the cache flushed, the engine
paused, the policy changed. However it goes, the server is idle and whole at the end,
and streams that nobody touched have said what they say alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from forking import (
    Answer,
    alone,
    assert_idle_pool,
    branch_of,
    new_group,
    reason_of,
    some_ids,
    stream,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from server import Server

NUM_EXAMPLES, NUM_EVENTS = 25, 14
PROMPT, NUM_TOKENS = some_ids("event order", 40), 24
POLICIES = ("eager", "off", "cap", "taper", "ledger", "triage")

slots = st.integers(0, 4)
metas = st.fixed_dictionaries(
    {
        "branch": st.integers(0, 2),
        "width": st.integers(3, 4),
        "depth": st.integers(0, 2),
        "num_own": st.integers(0, 3),
    }
)
events = st.one_of(
    st.tuples(st.just("open"), slots, metas),
    st.tuples(st.just("open"), slots, metas),
    st.tuples(st.just("read"), slots, st.integers(1, 30)),
    st.tuples(st.just("close"), slots),
    st.tuples(st.just("abort_branch"), slots),
    st.tuples(st.just("abort_below"), slots),
    st.tuples(st.just("abort_group"), st.integers(0, 1)),
    st.tuples(st.just("change_policy"), st.sampled_from(POLICIES)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("pause"), st.sampled_from(["in_place", "retract"])),
)


class Client:
    """Two groups, and streams that belong to them in turn."""

    def __init__(self, server: Server, expected: dict[int, list[int]]) -> None:
        self.server, self.expected = server, expected
        self.groups = [new_group(), new_group()]
        self.streams: dict[int, tuple[dict[str, Any], Iterator[Answer]]] = {}
        self.touched: set[str] = set()

    def open(self, slot: int, meta: dict[str, Any]) -> None:
        if slot in self.streams:
            return
        num_own = meta["num_own"]
        ids = [*PROMPT, *some_ids("own", num_own)]
        more = {"depth": meta["depth"], "max_new_tokens": NUM_TOKENS}
        more["parent"] = f"{self.groups[slot % 2]}.0"
        place = self.groups[slot % 2], ids, meta["branch"], meta["width"]
        body = branch_of(*place, **more) | {"rid": new_group()}
        self.streams[slot] = (body, stream(self.server, body))
        self.read(slot, 1)

    def read(self, slot: int, count: int) -> None:
        """Some events further; at the end the answer is compared."""
        if slot not in self.streams:
            return
        body, stream = self.streams[slot]
        for answer in itertools.islice(stream, count):
            if answer["meta_info"]["finish_reason"] is not None:
                self.finished(slot, body, answer)

    def finished(self, slot: int, body: dict[str, Any], answer: Answer) -> None:
        del self.streams[slot]
        expected = self.expected[len(body["input_ids"])]
        if reason_of(answer) == "abort":
            assert body["rid"] in self.touched
            # What was aborted in the queue has no ids at all.
            expected = expected[: len(answer.get("output_ids", ()))]
        assert list(answer.get("output_ids", ())) == expected

    def close(self, slot: int) -> None:
        if slot in self.streams:
            self.streams.pop(slot)[1].close()

    def abort_branch(self, slot: int) -> None:
        if slot in self.streams:
            rid = self.streams[slot][0]["rid"]
            self.touched.add(rid)
            self.send("/abort_request", {"rid": rid})

    def abort_below(self, slot: int) -> None:
        """The branch and its descendants, of which it has none."""
        if slot in self.streams:
            rid, group = self.streams[slot][0]["rid"], self.groups[slot % 2]
            self.touched.add(rid)
            self.send("/abort_request", {"group": group, "parent": rid})

    def abort_group(self, which: int) -> None:
        mine = (s for slot, s in self.streams.items() if slot % 2 == which)
        self.touched |= {body["rid"] for body, _ in mine}
        self.send("/abort_request", {"group": self.groups[which]})

    def change_policy(self, name: str) -> None:
        self.server.set_policy(policy=name)

    def flush(self) -> None:
        # Refused while anything runs.
        assert self.server.post("/flush_cache").status_code in (200, 400)

    def pause(self, mode: str) -> None:
        self.send("/pause_generation", {"mode": mode})
        self.send("/continue_generation", {})

    def send(self, path: str, body: dict[str, Any]) -> None:
        assert self.server.post(path, body).status_code == 200

    def end(self) -> None:
        """Read what is still open, and leave nothing behind."""
        for slot in list(self.streams):
            self.read(slot, NUM_TOKENS + 1)
        assert not self.streams
        for which in range(2):
            self.abort_group(which)


@pytest.fixture(scope="module")
def expected(taper_server: Server) -> dict[int, list[int]]:
    """Greedy ids by the length of the prompt."""
    bodies = [
        branch_of("", [*PROMPT, *some_ids("own", n)], max_new_tokens=NUM_TOKENS)
        for n in range(4)
    ]
    answers = alone(taper_server, bodies)
    return {
        len(body["input_ids"]): answer["output_ids"]
        for body, answer in zip(bodies, answers, strict=True)
    }


@settings(max_examples=NUM_EXAMPLES)
@given(events=st.lists(events, min_size=4, max_size=NUM_EVENTS))
def test_events_in_any_order_leave_the_server_idle_and_whole(
    taper_server: Server, expected: dict[int, list[int]], events: list[tuple[Any, ...]]
) -> None:
    client = Client(taper_server, expected)
    for name, *arguments in events:
        getattr(client, name)(*arguments)
    client.end()
    state = assert_idle_pool(taper_server)
    assert state["num_pins"] == 0
