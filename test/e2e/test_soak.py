"""Random forks, joins, faults and policies against one server, and what is left then.

Clients act at once, a few events each; then everything has to be idle and every token
accounted for; and so on for `TAPER_SOAK_S` seconds. `TAPER_SOAK_SEED` chooses other
events, `TAPER_SOAK_FLAGS` adds flags to the server (say, `--page-size 16`),
`TAPER_SOAK_RETRACT` retracts every so many steps (0: only for want of room).
`TAPER_SOAK_REPORT` names the file with the report.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import soak_report
from forking import STRICT, assert_idle_pool, wait_for
from soak_clients import Client, Expected, run_round

from server import EXACT, Server, running_server
from sglang_taper.server_process import session_members

SECONDS = float(os.environ.get("TAPER_SOAK_S", "60"))
SEED = os.environ.get("TAPER_SOAK_SEED", "0")
FLAGS = os.environ.get("TAPER_SOAK_FLAGS", "").split()
RETRACT_EVERY = int(os.environ.get("TAPER_SOAK_RETRACT", "25"))
NUM_CLIENTS, EVENTS_PER_ROUND = 4, 6
MAX_GROWTH = 0.02
# Caches of SGLang, of the allocator and of ours are still filling before.
STEADY_S = 500.0


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    """Four programs of the largest size and their branches do not fit in at once."""
    pool = ("--max-total-tokens", "1536", "--max-running-requests", "16")
    flags = (*EXACT, "--sleep-on-idle", "--chunked-prefill-size", "128", *FLAGS)
    env = dict(STRICT)
    if RETRACT_EVERY:
        env |= {"SGLANG_TEST_RETRACT": "1"}
        env |= {"SGLANG_TEST_RETRACT_INTERVAL": str(RETRACT_EVERY)}
    with running_server(*flags, env=env, pool=pool) as server:
        yield server


def soak(server: Server, clients: list[Client], memory: soak_report.Memory) -> int:
    """Rounds until the time is over; returns how many."""
    deadline, rounds = time.monotonic() + SECONDS, 0
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        while time.monotonic() < deadline:
            run_round(clients, pool, EVENTS_PER_ROUND)
            assert_idle_pool(server)
            assert soak_report.zombies_of(server.process.pid) == []
            memory.sample()
            rounds += 1
    return rounds


def describe(
    server: Server, clients: list[Client], memory: soak_report.Memory
) -> dict[str, Any]:
    log = server.text_of_log()
    return {
        "seconds": SECONDS,
        "seed": SEED,
        "flags": FLAGS,
        "retract_every_steps": RETRACT_EVERY,
        "events": soak_report.total([client.done for client in clients]),
        "finish_reasons": soak_report.total([client.reasons for client in clients]),
        "num_full_pools": log.count("KV cache pool is full. Retract requests"),
        "num_test_retractions": log.count("Testing retraction"),
        "num_tracebacks": log.count("Traceback (most recent call last)"),
        "zombies": soak_report.zombies_of(server.process.pid),
        "memory": memory.growth(),
    }


@pytest.mark.timeout(SECONDS + 600)
def test_random_events_leave_no_token_no_lock_no_memory_and_no_zombie(
    small_server: Server,
) -> None:
    memory = soak_report.Memory(small_server.process.pid)
    expected = Expected(small_server)
    clients = [Client(small_server, (SEED, i), expected) for i in range(NUM_CLIENTS)]
    report: dict[str, Any] = {}
    try:
        report["rounds"] = soak(small_server, clients, memory)
    finally:
        report |= describe(small_server, clients, memory)
        report["failed"] = repr(sys.exception()) if sys.exception() else None
        soak_report.write(report)
    for client in clients:
        client.check()
        client.check_fork()
    small_server.flush()
    state = assert_idle_pool(small_server)
    assert state["pool"]["free"] == state["pool"]["total"]
    assert state["num_pins"] == 0
    assert report["num_tracebacks"] == 0
    if SECONDS >= STEADY_S:
        assert max(process["growth"] for process in report["memory"]) <= MAX_GROWTH
    # A request that no client waits for any more, but the server does, would show.
    os.kill(small_server.process.pid, signal.SIGTERM)
    assert small_server.process.wait(60) == 0
    # Whoever has adopted its children may not have waited for them yet.
    wait_for(lambda: session_members(small_server.process.pid) == {}, 10)
