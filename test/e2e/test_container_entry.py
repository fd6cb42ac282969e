"""The entrypoint and health check of the container, on a real server outside one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forking import wait_for

from server import (
    PROFILE,
    SMALL_POOL,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Server,
    free_port,
)
from sglang_taper.server_process import session_members

DOCKER = Path(__file__).parents[2] / "docker"


NUM_TOKENS = 60


class Container:
    """The entrypoint as a process, and the environment it has."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        # `python3` and `sglang-taper` of this environment, as in the image.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PORT": str(self.port)}
        profile, log = folder / "a profile.json", folder / "log"
        profile.write_text(PROFILE)
        flags = ("--model-path", "smollm2", "--branch-policy=cap", "--branch-cap=3")
        flags += ("--latency-profile", str(profile))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                # The container listens on all addresses; a test only on this one.
                [DOCKER / "entrypoint.sh", *flags, "--host=127.0.0.1", *SMALL_POOL],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.server = Server(f"http://127.0.0.1:{self.port}", self.process, log)

    def is_healthy(self) -> bool:
        command = [sys.executable, DOCKER / "healthcheck.py"]
        ran = subprocess.run(command, env=self.environment, capture_output=True)
        return ran.returncode == 0

    def has_processes(self) -> bool:
        return session_members(self.process.pid) != {}


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    started = Container(tmp_path)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


def test_it_serves_what_its_flags_say_and_drains_on_sigterm(
    container: Container,
) -> None:
    server, process = container.server, container.process
    assert not container.is_healthy()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not container.is_healthy():
        assert process.poll() is None, server.text_of_log()[-3000:]
        assert time.monotonic() < deadline, server.text_of_log()[-3000:]
        time.sleep(1)

    assert server.state()["params"]["cap"] == 3
    # exec: the process that gets the container's signals is the server.
    command_line = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
    assert "sglang_taper.launch_server" in command_line

    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "n": 2}
    body = {"text": "The harbour town", "sampling_params": sampling}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, body)
        wait_for(lambda: server.state()["num_running"])
        process.terminate()
        wait_for(lambda: not container.is_healthy())
        answers = running.result()
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [NUM_TOKENS] * 2
    process.wait(STOP_TIMEOUT_S)
    wait_for(lambda: not container.has_processes(), STOP_TIMEOUT_S)
