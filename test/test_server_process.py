"""The process side, with small stand-ins for a server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from sglang_taper import server_process
from sglang_taper.errors import ServerEnded
from sglang_taper.server_process import ServerProcess, session_members

# A parent that ignores SIGTERM, and a child that renamed itself as SGLang's do.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import time; open('/proc/self/comm', 'w').write('x: (y) z'); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start `code` as a server."""
    started = []
    monkeypatch.setattr(server_process, "has_gpu", lambda: False)
    monkeypatch.setattr(server_process, "TERMINATE_S", 0.5)
    monkeypatch.setattr(server_process.tempfile, "tempdir", str(tmp_path))

    def start(code: str) -> ServerProcess:
        real = subprocess.Popen

        def stand_in(command, **kwargs):
            return real([sys.executable, "-c", code], **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(server_process.subprocess, "Popen", stand_in)
            started.append(ServerProcess("smollm2"))
        return started[-1]

    yield start
    for server in started:
        server.stop(keep_log=False)


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stopping_ends_children_with_other_names_and_those_that_ignore_it(start):
    server = start(STUBBORN)
    wait_until(lambda: "x: (y) z" in session_members(server.session).values())
    server.stop(keep_log=False)
    assert session_members(server.session) == {}
    assert not server.log.exists()


def test_children_are_ended_when_the_server_itself_is_gone(start):
    server = start(STUBBORN)
    wait_until(lambda: len(session_members(server.session)) == 2)
    os.kill(server.session, signal.SIGKILL)
    server.stop(keep_log=True)
    assert session_members(server.session) == {}
    assert server.log.exists()


# A command that has started a server, says so, and waits.
COMMAND = """
import subprocess, sys, time
from sglang_taper.server_process import end_with_parent
child = [sys.executable, "-c", "import time; time.sleep(600)"]
server = subprocess.Popen(child, start_new_session=True, preexec_fn=end_with_parent)
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_a_command_that_is_killed():
    python = [sys.executable, "-c", COMMAND]
    with subprocess.Popen(python, stdout=subprocess.PIPE) as command:
        session = int(command.stdout.readline())
        assert len(session_members(session)) == 1
        command.kill()
    wait_until(lambda: session_members(session) == {}, 5)


def test_a_server_that_ends_at_start_is_reported_with_the_end_of_its_log(start):
    server = start("print('no such model'); raise SystemExit(2)")
    with pytest.raises(ServerEnded, match=r"ended with 2 .*\n  no such model"):
        asyncio.run(server.ready(lambda line: None))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_the_end_of_a_running_server_is_one_sentence(start, code, words):
    server = start(code)
    with pytest.raises(ServerEnded) as caught:
        asyncio.run(server.ended())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(server.log) in str(caught.value)
