"""Clients of the soak: each runs one forking program after the other, at random."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forking import (
    Answer,
    branch_of,
    in_one_call,
    new_group,
    plain,
    reason_of,
    some_ids,
    stream,
)

from server import Server

MAX_TOKENS, MAX_FAN_OUT = 260, 6
POLICIES = ("eager", "off", "cap", "taper", "taper-paper", "ledger", "triage")
UTILITIES = ("linear", "concave", "priority", "age", "need", "finishing")
PROBE_FAN_OUT = 3
# A process that asks for a stream, says when it has begun, and reads nothing more.
DOOMED = """
import socket, sys, time
host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
client = socket.create_connection((host, port))
head = f"POST /generate HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
client.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
client.recv(200)
print("begun", flush=True)
time.sleep(600)
"""


class Expected:
    """What greedy requests say alone: a plain one, and children of a fork."""

    def __init__(self, server: Server) -> None:
        self.probe = plain(branch_of("", some_ids("probe", 40), max_new_tokens=6))
        self.children = [
            [*self.probe["input_ids"], *some_ids(("child", i), 3)]
            for i in range(PROBE_FAN_OUT)
        ]
        self.alone = server.generate(self.probe)["output_ids"]
        self.of_children = [
            server.generate(plain(branch_of("", ids)))["output_ids"]
            for ids in self.children
        ]


class Client:
    """One program after the other: token ids that grow by what was generated."""

    def __init__(self, server: Server, seed: object, expected: Expected) -> None:
        self.server, self.random = server, random.Random(str(seed))
        self.expected = expected
        self.done: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
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
            self.done[event.__name__] += 1
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
        self.reasons.update(map(reason_of, answers))
        assert {reason_of(answer) for answer in answers} <= {"length", "abort"}
        return answers

    def control(self, path: str, body: dict[str, Any]) -> None:
        assert self.server.post(path, body).status_code == 200

    # -- programs

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

    def write_on(self) -> None:
        """By text, so that the tokenizer process remembers ids as well."""
        body = branch_of(self.group, (), max_new_tokens=12)
        del body["input_ids"]
        text = f"Story {self.random.random()}. There was"
        for _ in range(2):
            (answer,) = self.send({**body, "text": text})
            text += answer["text"] + " And then"

    # -- faults

    def abort(self) -> None:
        bodies = self.children(60)
        target = self.random.choice(
            (
                {"group": self.group},
                {"group": self.group, "parent": bodies[-1]["rid"]},
                {"rid": bodies[0]["rid"]},
            )
        )
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

    def read_slowly(self) -> None:
        """Its stream waits in the server while it does something else."""
        width = self.random.randint(2, 4)
        more = {"n": width, "max_new_tokens": self.random.randint(8, 40)}
        ended: Counter[int] = Counter()
        for event in stream(self.server, branch_of(self.group, self.ids, **more)):
            ended[event["index"]] += event["meta_info"]["finish_reason"] is not None
            if self.random.random() < 0.1:
                time.sleep(self.random.uniform(0, 1))
        assert ended == dict.fromkeys(range(width), 1)

    def be_killed(self) -> None:
        """SIGKILL, in a process of its own: it says no goodbye."""
        body = branch_of(self.group, self.ids, n=3, max_new_tokens=200)
        host, port = self.server.url.removeprefix("http://").split(":")
        arguments = [host, port, json.dumps({**body, "stream": True})]
        command = [sys.executable, "-S", "-c", DOOMED, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == b"begun\n"
            time.sleep(self.random.uniform(0, 0.5))
            doomed.kill()

    def hang_up_early(self) -> None:
        """Half of a request, and no more."""
        host, port = self.server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n"
            client.sendall(head + b'{"text": "a')

    def send_nonsense(self) -> None:
        bad = branch_of(self.group, self.ids, self.random.randint(5, 9), 2)
        assert self.server.post("/generate", bad).status_code == 400
        assert self.server.post("/taper/policy", {"cap": "x"}).status_code == 400

    # -- the operator

    def flush(self) -> None:
        # Refused while anything runs, which is most of the time.
        assert self.server.post("/flush_cache").status_code in (200, 400)

    def pause(self) -> None:
        mode = self.random.choice(("in_place", "retract"))
        self.control("/pause_generation", {"mode": mode})
        time.sleep(self.random.uniform(0, 0.3))
        self.control("/continue_generation", {})

    def change_policy(self) -> None:
        changes = {
            "policy": self.random.choice(POLICIES),
            "cap": self.random.randint(1, 6),
            "rho": self.random.choice((None, 0.0, 0.3, 1.0)),
            "deadline": self.random.choice(("schedule", "progress")),
            "utility": self.random.choice(UTILITIES),
            "tpot_slo_ms": self.random.choice((1, 20, 50, 500)),
            "prefill_hold_s": self.random.choice(("off", "auto", 0.2)),
        }
        self.server.set_policy(**changes)

    # -- what must not change

    def check(self) -> None:
        """A request that is nobody's branch says what it always says."""
        (answer,) = self.send(self.expected.probe)
        assert answer["output_ids"] == self.expected.alone

    def check_fork(self) -> None:
        """So do the branches of a fork."""
        group = new_group()
        bodies = [
            branch_of(group, ids, i, PROBE_FAN_OUT, depth=1)
            for i, ids in enumerate(self.expected.children)
        ]
        answers = self.send(in_one_call(bodies))
        assert [a["output_ids"] for a in answers] == self.expected.of_children


EVENTS: dict[Callable[[Client], None], int] = {
    Client.fork: 6,
    Client.fork_over_connections: 3,
    Client.sample: 3,
    Client.join: 3,
    Client.write_on: 2,
    Client.abort: 4,
    Client.disconnect: 3,
    Client.read_slowly: 2,
    Client.be_killed: 2,
    Client.hang_up_early: 1,
    Client.send_nonsense: 1,
    Client.flush: 1,
    Client.pause: 1,
    Client.change_policy: 2,
    Client.check: 2,
    Client.check_fork: 2,
}


def run_round(
    clients: Sequence[Client], pool: ThreadPoolExecutor, num_events: int
) -> None:
    """Raises what went wrong in any client, after all have stopped."""
    running = [pool.submit(client.run, num_events) for client in clients]
    errors = [error for future in running if (error := future.exception())]
    if errors:
        raise ExceptionGroup("clients failed", errors)
