"""A server that a command needs: in a session of its own, watched, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from sglang_taper.errors import ServerEnded, ServerProcessError

# Enough for the mix, and quick to allocate; a GPU keeps SGLang's own sizes.
CPU_FLAGS = ("--max-total-tokens", "16384", "--max-running-requests", "64")
START_TIMEOUT_S = 900
NOTE_EVERY_S = 10
POLL_S = 0.2
TERMINATE_S = 8
KILL_S = 10
SHOWN_LOG_LINES = 15
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """In a child before `exec`: SIGKILL when its parent ends, however that ends.

    The processes of SGLang's server do the same. Linux means the thread that started
    the child, so that one has to stay; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess:
    """A server process with everything it spawned, and its log."""

    def __init__(
        self,
        model_path: str,
        flags: Sequence[str] = (),
        module: str = "sglang_taper.launch_server",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; `ready` waits for it. Writes a log into the temporary folder.

        `env` is added to this process's environment.
        """
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", module]
        command += ["--model-path", model_path, "--port", str(port)]
        command += ["--sleep-on-idle", *([] if has_gpu() else CPU_FLAGS), *flags]
        handle, name = tempfile.mkstemp(prefix="sglang-taper-server-", suffix=".log")
        self.log = Path(name)
        try:
            # Its own session: Ctrl-C in the terminal reaches only us, and whatever
            # the server spawns or renames can be found again.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        finally:
            os.close(handle)

    @property
    def session(self) -> int:
        return self._process.pid

    async def ready(self, note: Callable[[str], None]) -> None:
        """Wait until it serves; `note` gets a line now and then.

        Raises ServerEnded with the end of its log, else ServerProcessError after
        15 minutes.
        """
        began = time.monotonic()
        noted_s = 0.0
        async with httpx.AsyncClient(timeout=5) as http:
            while not await _is_healthy(http, self.url):
                elapsed_s = time.monotonic() - began
                if self._process.poll() is not None:
                    raise ServerEnded(self._start_failure())
                if elapsed_s > START_TIMEOUT_S:
                    raise ServerProcessError(
                        f"the server did not become ready: {self.log}"
                    )
                if elapsed_s >= noted_s + NOTE_EVERY_S:
                    noted_s = elapsed_s
                    note(f"  still starting after {elapsed_s:.0f} s")
                await asyncio.sleep(POLL_S)
        note(f"  ready after {time.monotonic() - began:.0f} s at {self.url}")

    def _start_failure(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        tail = "\n".join(f"  {line}" for line in lines[-SHOWN_LOG_LINES:])
        code = self._process.returncode
        return f"the server ended with {code} before it was ready:\n{tail}"

    async def ended(self) -> None:
        """Wait for its end, which is always too early: raises ServerEnded."""
        while self._process.poll() is None:
            await asyncio.sleep(POLL_S)
        raise ServerEnded(
            f"the server ended while it was needed "
            f"({_exit_words(self._process.returncode)}); its log is {self.log}"
        )

    def stop(self, keep_log: bool) -> None:
        """End every process of its session and check that none is left.

        Blocks for a few seconds. Raises ServerProcessError naming what is left.
        """
        _signal_session(self.session, signal.SIGTERM)
        if self._wait_until_gone(TERMINATE_S):
            _signal_session(self.session, signal.SIGKILL)
            if left := self._wait_until_gone(KILL_S):
                names = ", ".join(f"{pid} ({name})" for pid, name in left.items())
                raise ServerProcessError(
                    f"processes of the server could not be ended: {names}"
                )
        if not keep_log:
            self.log.unlink(missing_ok=True)

    def _wait_until_gone(self, seconds: float) -> dict[int, str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._process.poll()  # reaps it
            if not session_members(self.session):
                break
            time.sleep(POLL_S)
        return session_members(self.session)


def has_gpu() -> bool:
    """Whether the server will find an accelerator by itself."""
    import torch

    return bool(torch.cuda.is_available() or torch.accelerator.is_available())


def session_members(session: int) -> dict[int, str]:
    """Pid -> name of the processes of a session that still run (zombies do not)."""
    members = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name, state, owner = _stat(entry)
                if owner == session and state != "Z":
                    members[int(entry.name)] = name
    return members


def _stat(process: Path) -> tuple[str, str, int]:
    """Name, state and session. SGLang's processes have names with blanks in them."""
    head, _, tail = (process / "stat").read_text().rpartition(")")
    state, _, _, session = tail.split()[:4]
    return head.partition("(")[2], state, int(session)


def _signal_session(session: int, number: signal.Signals) -> None:
    for pid in session_members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _exit_words(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _is_healthy(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False
