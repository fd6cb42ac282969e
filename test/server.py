"""A real server for tests: started once per set of flags, watched, and ended."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from sglang_taper.server_process import end_with_parent

# Exactly the same arithmetic whatever the batch: greedy outputs can be compared.
EXACT = ("--dtype", "float32")
START_TIMEOUT_S = 420
STOP_TIMEOUT_S = 30
SMALL_POOL = (
    *("--max-total-tokens", "8192", "--max-running-requests", "32"),
    # Several servers may wait for their tests on few cores.
    "--sleep-on-idle",
)

OURS = "sglang_taper.launch_server"
# In place of a calibration, which takes up to twenty seconds on a CPU.
PROFILE = '{"a_ms": 60, "b_ms_per_row": 4, "c_ms_per_token": 0.01}'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process and its log."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.process, self.log = url, process, log

    def post(self, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", 300)
        return requests.post(self.url + path, json=body, **kwargs)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def generate(self, body: dict[str, Any]) -> Any:
        answer = self.post("/generate", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def state(self) -> dict[str, Any]:
        answer = self.get("/taper/state")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def set_policy(self, **changes: Any) -> dict[str, Any]:
        answer = self.post("/taper/policy", changes)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def flush(self) -> None:
        """Wait until the engine is idle and its cache is empty."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.2)
        raise AssertionError("the engine did not become idle within a minute")

    def text_of_log(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running_server(
    *flags: str,
    module: str = OURS,
    model: str = "smollm2",
    env: Mapping[str, str] | None = None,
    pool: Sequence[str] = SMALL_POOL,
    calibrates: bool = False,
) -> Iterator[Server]:
    """A ready server of `module` with these flags; fails with its log if it dies.

    Ours begins with `PROFILE` unless it `calibrates` or `flags` name another.
    """
    port = free_port()
    if module == OURS and not calibrates and "--latency-profile" not in flags:
        flags = (*flags, "--latency-profile", str(_profile()))
    handle, name = tempfile.mkstemp(suffix=".log", prefix="taper-server-")
    command = [sys.executable, "-m", module, "--model-path", model, "--port", str(port)]
    command += [*pool, *flags]
    process = subprocess.Popen(
        command,
        stdout=handle,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        start_new_session=True,
        # A test run that is killed leaves no server behind.
        preexec_fn=end_with_parent,
    )
    os.close(handle)
    server = Server(f"http://127.0.0.1:{port}", process, Path(name))
    try:
        _wait_until_ready(server)
        yield server
    finally:
        server.stop()
        server.log.unlink(missing_ok=True)


@functools.cache
def _profile() -> Path:
    path = Path(tempfile.mkdtemp(prefix="taper-profile-")) / "profile.json"
    path.write_text(PROFILE)
    return path


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(
                f"server ended with {server.process.returncode}:\n"
                + server.text_of_log()[-3000:]
            )
        with contextlib.suppress(requests.RequestException):
            if requests.get(server.url + "/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError("server not ready in time:\n" + server.text_of_log()[-3000:])
