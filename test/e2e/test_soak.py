"""Random forks, joins, aborts, disconnects, flushes and pauses against one server.

Clients act at once, a few events each; then everything has to be idle and every token
accounted for; and so on for `TAPER_SOAK_S` seconds. `TAPER_SOAK_SEED` chooses other
events, `TAPER_SOAK_FLAGS` adds flags to the server (say, `--page-size 16`).
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from forking import (
    STRICT,
    Answer,
    assert_idle_pool,
    branch_of,
    in_one_call,
    new_group,
    plain,
    reason_of,
    some_ids,
    stream,
)

from server import EXACT, Server, running_server

SECONDS = float(os.environ.get("TAPER_SOAK_S", "20"))
SEED = os.environ.get("TAPER_SOAK_SEED", "0")
FLAGS = os.environ.get("TAPER_SOAK_FLAGS", "").split()
NUM_CLIENTS, EVENTS_PER_ROUND = 4, 6
MAX_TOKENS, MAX_FAN_OUT = 260, 6
POLICIES = ("eager", "off", "cap", "taper")


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    """Four programs of the largest size and their branches do not fit in at once."""
    pool = ("--max-total-tokens", "1536", "--max-running-requests", "16")
    flags = (*EXACT, "--sleep-on-idle", "--chunked-prefill-size", "128", *FLAGS)
    with running_server(*flags, env=STRICT, pool=pool) as server:
        yield server


class Client:
    """One program after the other: token ids that grow by what was generated."""

    def __init__(self, server: Server, seed: object) -> None:
        self.server, self.random = server, random.Random(str(seed))
        self.probe = plain(branch_of("", some_ids("probe", 40), max_new_tokens=6))
        self.expected: list[int] | None = None
        self.start()

    def start(self) -> None:
        """A new request."""
        self.group, self.depth = new_group(), 0
        self.ids = some_ids(self.random.random(), self.random.randint(1, 120))

    def run(self, num_events: int) -> None:
        """That many random events, one after the other."""
        for _ in range(num_events):
            event = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
            event(self)
            if len(self.ids) > MAX_TOKENS or self.depth > 20:
                self.start()

    def children(self, new_tokens: int) -> list[dict[str, Any]]:
        """A fork of some children, with own text each or with none."""
        width = self.random.randint(1, MAX_FAN_OUT)
        own = self.random.choice((0, 0, 1, 9))
        self.depth += 1
        return [
            branch_of(
                *(self.group, [*self.ids, *some_ids(i, own)], i, width),
                depth=self.depth,
                max_new_tokens=self.random.randint(1, new_tokens),
            )
            | {"rid": new_group()}
            for i in range(width)
        ]

    def send(self, body: dict[str, Any]) -> list[Answer]:
        response = self.server.post("/generate", body, timeout=300)
        assert response.status_code == 200, response.text
        found = response.json()
        answers: list[Answer] = found if isinstance(found, list) else [found]
        assert {reason_of(answer) for answer in answers} <= {"length", "abort"}
        return answers

    def control(self, path: str, body: dict[str, Any]) -> None:
        assert self.server.post(path, body).status_code == 200

    # -- events

    def fork(self) -> None:
        bodies = self.children(24)
        answers = self.send(in_one_call(bodies))
        chosen = self.random.randrange(len(answers))
        self.ids = bodies[chosen]["input_ids"] + answers[chosen]["output_ids"]

    def fork_over_connections(self) -> None:
        bodies = self.children(24)
        self.random.shuffle(bodies)
        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(self.send, bodies))

    def sample(self) -> None:
        width = self.random.randint(2, MAX_FAN_OUT)
        more = {"n": width, "temperature": 1.0, "max_new_tokens": 8}
        answers = self.send(branch_of(self.group, self.ids, **more))
        assert len(answers) == width

    def join(self) -> None:
        bodies = self.children(12)
        answers = self.send(in_one_call(bodies))
        for body, answer in zip(bodies, answers, strict=True):
            self.ids = self.ids + body["input_ids"][len(self.ids) :]
            self.ids = self.ids + answer["output_ids"]
        if len(self.ids) <= MAX_TOKENS:
            (answer,) = self.send(branch_of(self.group, self.ids))
            self.ids = self.ids + answer["output_ids"]

    def abort(self) -> None:
        bodies = self.children(60)
        target = self.random.choice(({"group": self.group}, {"rid": bodies[0]["rid"]}))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.send, in_one_call(bodies))
            time.sleep(self.random.uniform(0, 0.6))
            self.control("/abort_request", target)
            running.result()

    def disconnect(self) -> None:
        more = {"n": self.random.randint(1, 4), "max_new_tokens": 200}
        events = stream(self.server, branch_of(self.group, self.ids, **more))
        with contextlib.closing(events):
            for _ in range(self.random.randint(1, 5)):
                next(events)

    def flush(self) -> None:
        # Refused while anything runs, which is most of the time.
        assert self.server.post("/flush_cache").status_code in (200, 400)

    def pause(self) -> None:
        mode = self.random.choice(("in_place", "retract"))
        self.control("/pause_generation", {"mode": mode})
        time.sleep(self.random.uniform(0, 0.3))
        self.control("/continue_generation", {})

    def change_policy(self) -> None:
        self.server.set_policy(policy=self.random.choice(POLICIES))

    def check(self) -> None:
        """A request that is nobody's branch says what it always says."""
        (answer,) = self.send(self.probe)
        self.expected = self.expected or answer["output_ids"]
        assert answer["output_ids"] == self.expected


EVENTS: dict[Callable[[Client], None], int] = {
    Client.fork: 6,
    Client.fork_over_connections: 3,
    Client.sample: 3,
    Client.join: 3,
    Client.abort: 4,
    Client.disconnect: 3,
    Client.flush: 1,
    Client.pause: 1,
    Client.change_policy: 2,
    Client.check: 2,
}


def run_round(clients: Sequence[Client], pool: ThreadPoolExecutor) -> None:
    """Raises what went wrong in any client, after all have stopped."""
    running = [pool.submit(client.run, EVENTS_PER_ROUND) for client in clients]
    errors = [error for future in running if (error := future.exception())]
    if errors:
        raise ExceptionGroup("clients failed", errors)


@pytest.mark.timeout(SECONDS + 600)
def test_random_events_leave_no_token_no_lock_and_no_zombie(
    small_server: Server,
) -> None:
    clients = [Client(small_server, (SEED, i)) for i in range(NUM_CLIENTS)]
    clients[0].check()
    for client in clients:
        client.expected = clients[0].expected
    deadline = time.monotonic() + SECONDS
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        while time.monotonic() < deadline:
            run_round(clients, pool)
            assert_idle_pool(small_server)
    for client in clients:
        client.check()
    small_server.flush()
    state = assert_idle_pool(small_server)
    assert state["pool"]["free"] == state["pool"]["total"]
    assert state["num_pins"] == 0
