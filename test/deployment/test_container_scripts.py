"""The scripts of the container, run outside one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

DOCKER = Path(__file__).parents[2] / "docker"


@contextmanager
def answering(status: int) -> Iterator[int]:
    """The port of a server that answers every GET with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server.server_port
        server.shutdown()


def health_check(port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, DOCKER / "healthcheck.py"]
    environment = {**os.environ, "PORT": str(port)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_health_check_passes_only_when_the_server_says_200() -> None:
    with answering(200) as port:
        assert health_check(port).returncode == 0
    with answering(503) as port:
        assert health_check(port).returncode == 1


def test_the_health_check_names_what_does_not_answer() -> None:
    with answering(200) as port:
        pass
    failed = health_check(port)
    assert failed.returncode == 1
    assert f"http://127.0.0.1:{port}/health" in failed.stderr


def entrypoint(
    folder: Path, *words: str, check: str = "exit 0"
) -> subprocess.CompletedProcess[str]:
    """Run the entrypoint with commands in `folder` before all others."""
    commands = {"sglang-taper": f"echo a hook has changed; {check}"}
    commands["python3"] = 'echo "$@"'
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [DOCKER / "entrypoint.sh", *words],
        env={**os.environ, "PATH": path, "PORT": "31000"},
        capture_output=True,
        text=True,
    )


def test_flags_go_to_the_server_untouched_and_after_ours(tmp_path: Path) -> None:
    flags = ["--model-path", "a model", "--json", '{"a": "b c"}', "--port", "9"]
    ran = entrypoint(tmp_path, *flags)
    ours = "-m sglang_taper.launch_server --host 0.0.0.0 --port 31000"
    assert ran.stdout == f'{ours} --model-path a model --json {{"a": "b c"}} --port 9\n'
    assert ran.returncode == 0


def test_without_flags_the_server_says_what_it_needs(tmp_path: Path) -> None:
    assert entrypoint(tmp_path).stdout.startswith("-m sglang_taper.launch_server")


def test_another_command_is_run_as_it_is(tmp_path: Path) -> None:
    ran = entrypoint(tmp_path, "sh", "-c", "echo $0 $1; exit 7", "a", "b")
    assert (ran.returncode, ran.stdout) == (7, "a b\n")


def test_a_failing_check_is_reported_and_no_server_starts(tmp_path: Path) -> None:
    ran = entrypoint(tmp_path, "--model-path", "m", check="exit 2")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "a hook has changed" in ran.stderr
