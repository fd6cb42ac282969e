"""A server that is told to end, and one whose scheduler is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests as http
from forking import branch_of, new_group, reason_of, some_ids, stream, wait_for

from server import EXACT, OURS, PROFILE, Server, running_server
from sglang_taper.server_process import session_members

# SGLang looks every five seconds whether it was told, and then whether all have ended.
DRAIN_S, NOTICE_S = 60, 10
NUM_BRANCHES, NUM_TOKENS = 6, 30
PLAIN = "sglang.launch_server"


@contextlib.contextmanager
def busy_server(
    module: str, folder: Path
) -> Iterator[tuple[Server, list[Future[Any]]]]:
    """Under `off` one branch of each fork decodes and five are deferred."""
    # In place of a calibration, which takes time.
    profile = folder / "profile.json"
    profile.write_text(PROFILE)
    flags = (*EXACT, "--branch-policy", "off", "--latency-profile", str(profile))
    with (
        running_server(*flags, module=module) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        bodies = [fork(seed) for seed in range(2)]
        running = [pool.submit(server.generate, bodies[0])]
        running.append(pool.submit(read_stream, server, bodies[1]))
        wait_for(lambda: server.state()["num_running"] == 2 * NUM_BRANCHES)
        yield server, running


def fork(seed: int) -> dict[str, Any]:
    more = {"n": NUM_BRANCHES, "max_new_tokens": NUM_TOKENS}
    return branch_of(new_group(), some_ids(seed, 30), **more)


def read_stream(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The last event of each branch."""
    last = {event["index"]: event for event in stream(server, body)}
    return list(last.values())


def end_of(server: Server, seconds: float) -> int:
    """Exit code of the server; every process it had started is gone with it."""
    code = server.process.wait(seconds)
    wait_for(lambda: session_members(server.process.pid) == {}, 5)
    return code


@pytest.mark.parametrize("module", [OURS, PLAIN])
def test_sigterm_lets_all_branches_end_those_that_are_deferred_too(
    module: str, tmp_path: Path
) -> None:
    with busy_server(module, tmp_path) as (server, running):
        os.kill(server.process.pid, signal.SIGTERM)
        wait_for(lambda: http.get(server.url + "/health").status_code == 503, 10)
        for answers in (future.result(DRAIN_S) for future in running):
            assert len(answers) == NUM_BRANCHES
            assert {reason_of(answer) for answer in answers} == {"length"}
            assert {answer["meta_info"]["completion_tokens"] for answer in answers} == {
                NUM_TOKENS
            }
        assert end_of(server, DRAIN_S) == 0
        assert "Traceback" not in server.text_of_log()


def test_a_killed_scheduler_is_noticed_and_told_within_seconds(tmp_path: Path) -> None:
    with busy_server(OURS, tmp_path) as (server, running):
        (scheduler,) = [
            pid
            for pid, name in session_members(server.process.pid).items()
            if "schedul" in name
        ]
        began = time.monotonic()
        os.kill(scheduler, signal.SIGKILL)
        for future in running:
            with pytest.raises((http.RequestException, AssertionError)):
                assert_complete(future.result(NOTICE_S))
        assert end_of(server, NOTICE_S) != 0
        assert time.monotonic() - began < NOTICE_S
        assert "scheduler" in server.text_of_log().rpartition("crashed")[0][-300:]


def assert_complete(answers: list[dict[str, Any]]) -> None:
    assert [reason_of(answer) for answer in answers] == ["length"] * NUM_BRANCHES
