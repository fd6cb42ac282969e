"""From a fresh clone to a running demo or test suite: `bootstrap.py demo | test`.

A plain file for a machine that has Python, a C compiler and nothing else: standard
library only, run by path before anything is installed. It makes a virtual environment
under `$XDG_CACHE_HOME/sglang_taper` (or `~/.cache`), installs this clone into it in
editable form, and replaces itself with the demo or with pytest.

The environment is shared by all clones with the same `pyproject.toml` and Python. A run
holds its lock, shared, to the end; who must install something, or point it at another
clone, waits to hold the lock alone. So no run ever sees the code of another clone.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Run by path, this folder comes first in sys.path, and its package `platform`
    # would hide the standard library's.
    _here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != _here]

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MIN_PYTHON = (3, 11)
# The finished environment takes 11.1 GB (measured with sglang 0.5.23).
REQUIRED_DISK_GB = 12
STAMP = "taper_stamp.json"
EXTRAS = {"demo": None, "test": "test"}
USAGE = """\
usage: bootstrap.py demo [arguments of `sglang-taper demo`]
       bootstrap.py test [arguments of pytest]"""


class BootstrapError(Exception):
    """Nothing more can be done: one line for the user, and the exit code."""

    def __init__(self, reason: str, code: int = 1) -> None:
        super().__init__(reason)
        self.code = code


def _call(command: list[str]) -> int:
    # Inheriting the lock's descriptor, a pip that outlives a killed parent keeps
    # everybody else out of the environment until it has ended.
    return subprocess.call(command, close_fds=False)


class Environment:
    """The virtual environment at `venv`, to serve the code of `clone`.

    `run` executes a command line and returns its exit code.
    """

    def __init__(
        self, venv: Path, clone: Path, run: Callable[[list[str]], int] = _call
    ) -> None:
        self.venv, self.clone, self._run = venv, clone, run
        self.python = venv / "bin" / "python"

    def is_ready(self, extra: str | None) -> bool:
        """Whether it serves this clone, with the dependencies of `extra` if named."""
        stamp = self._read_stamp()
        return (
            stamp is not None
            and stamp["clone"] == str(self.clone)
            and (extra is None or extra in stamp["extras"])
        )

    def prepare(self, extra: str | None) -> None:
        """Install what is missing; the caller holds the lock alone.

        Raises BootstrapError. Interrupted anywhere, the next call does it again.
        """
        stamp = self._read_stamp()
        installed = set(stamp["extras"] if stamp else ())
        wanted = installed | {extra} if extra else installed
        if stamp is None:
            self._create()
        else:
            # From here to the end it may serve either clone, so it counts for none.
            self._write_stamp(None, installed)
        self._install(wanted, with_dependencies=stamp is None or wanted != installed)
        self._write_stamp(str(self.clone), wanted)

    def _create(self) -> None:
        _require_venv_module()
        _require_disk(self.venv)
        say("nothing installed yet: about 5 GB to download, some minutes")
        # What an interrupted installation left is not worth trusting: pip keeps the
        # downloads, so starting over is quick.
        venv = [sys.executable, "-m", "venv", "--clear", str(self.venv)]
        self._step("making the virtual environment", venv)
        # setuptools stays installed so that pointing at another clone needs no network.
        self._pip("upgrading pip", "--upgrade", "pip", "setuptools>=68")

    def _install(self, extras: set[str], with_dependencies: bool) -> None:
        target = f"{self.clone}[{','.join(sorted(extras))}]" if extras else self.clone
        editable = ["--no-build-isolation", "--editable", str(target)]
        if with_dependencies:
            self._pip(f"installing {target} and what it needs", *editable)
        else:
            self._pip(f"pointing it at {self.clone}", "--no-deps", "-qq", *editable)

    def _pip(self, what: str, *arguments: str) -> None:
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        self._step(what, [*pip, *arguments])

    def _step(self, what: str, command: list[str]) -> None:
        say(f"{what} ...")
        start = time.monotonic()
        if code := self._run(command):
            raise BootstrapError(f"{what} failed: {' '.join(command)}", code)
        say(f"{what}: {time.monotonic() - start:.0f} s")

    def _read_stamp(self) -> dict[str, Any] | None:
        """What the last finished installation wrote, or None."""
        try:
            stamp = json.loads((self.venv / STAMP).read_text())
        except (OSError, ValueError):
            return None
        # The interpreter it was made from may be gone.
        return stamp if self.python.exists() else None

    def _write_stamp(self, clone: str | None, extras: set[str]) -> None:
        draft = self.venv / f"{STAMP}.new"
        draft.write_text(json.dumps({"clone": clone, "extras": sorted(extras)}))
        draft.replace(self.venv / STAMP)


def say(text: str) -> None:
    """One line on stderr, at once."""
    print(f"[sglang-taper] {text}", file=sys.stderr, flush=True)


def venv_path(pyproject: bytes, python: tuple[int, int]) -> Path:
    """Where the environment for this `pyproject.toml` and (major, minor) belongs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256(pyproject + f"\n{python[0]}.{python[1]}".encode())
    return Path(base).absolute() / "sglang_taper" / f"venv-{key.hexdigest()[:8]}"


def require_python(version: tuple[int, int]) -> None:
    """Raise BootstrapError when (major, minor) is older than the package supports."""
    if version < MIN_PYTHON:
        found, needed = (".".join(map(str, v)) for v in (version, MIN_PYTHON))
        raise BootstrapError(f"Python {found} is too old: {needed} or newer is needed")


def lock_prepared(environment: Environment, extra: str | None) -> int:
    """Prepare the environment if it needs it; return the descriptor of a shared lock.

    The descriptor survives `exec`, and with it the lock, until the run has ended.
    """
    environment.venv.parent.mkdir(parents=True, exist_ok=True)
    lock_file = environment.venv.with_suffix(".lock")
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    os.set_inheritable(lock, True)
    while True:
        fcntl.flock(lock, fcntl.LOCK_SH)
        # Asked again after each installation: between giving up the exclusive lock
        # and getting the shared one, another clone may have had its turn.
        if environment.is_ready(extra):
            return lock
        _lock_alone(lock)
        if not environment.is_ready(extra):
            environment.prepare(extra)


def _lock_alone(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another run that uses this virtual environment ...")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _require_venv_module() -> None:
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise BootstrapError(
                f"this Python has no module {module!r}: install it (on Debian and "
                "Ubuntu the package python3-venv) and start again"
            )


def _require_disk(venv: Path) -> None:
    # A half-made environment is cleared first, so what it holds counts as free.
    if venv.exists():
        shutil.rmtree(venv)
    free_gb = shutil.disk_usage(venv.parent).free / 1e9
    if free_gb < REQUIRED_DISK_GB:
        raise BootstrapError(
            f"{venv.parent} has {free_gb:.1f} GB free and {REQUIRED_DISK_GB} GB are "
            "needed: make room, or set XDG_CACHE_HOME to a larger disk"
        )


def final_command(environment: Environment, name: str, rest: list[str]) -> list[str]:
    """The command this process turns into."""
    if name == "demo":
        return [str(environment.venv / "bin" / "sglang-taper"), "demo", *rest]
    return [str(environment.python), "-m", "pytest", *rest]


def _become(environment: Environment, name: str, rest: list[str]) -> NoReturn:
    command = final_command(environment, name, rest)
    search = f"{environment.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ.update(VIRTUAL_ENV=str(environment.venv), PATH=search)
    if name == "test":
        # pytest finds its settings and the tests from the root of the clone.
        os.chdir(environment.clone)
    os.execv(command[0], command)


def main(arguments: list[str]) -> int:
    """Exit code, unless all went well: then the process has become demo or pytest."""
    if not arguments or arguments[0] not in EXTRAS:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    name, *rest = arguments
    clone = Path(__file__).resolve().parents[2]
    try:
        require_python(sys.version_info[:2])
        pyproject = (clone / "pyproject.toml").read_bytes()
        environment = Environment(venv_path(pyproject, sys.version_info[:2]), clone)
        say(f"virtual environment: {environment.venv}")
        lock_prepared(environment, EXTRAS[name])
        _become(environment, name, rest)
    except BootstrapError as error:
        say(f"error: {error}")
        return error.code
    except OSError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next start takes up from here")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
