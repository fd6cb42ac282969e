"""From a clone to a run: which commands, what survives an interruption, who waits."""

from __future__ import annotations

import ast
import fcntl
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from sglang_taper import bootstrap
from sglang_taper.bootstrap import BootstrapError, Environment

SOURCE = Path(bootstrap.__file__)


class FakeRunner:
    """Records commands, makes the interpreter `venv` would make, fails on demand."""

    def __init__(self, python: Path) -> None:
        self.python = python
        self.commands: list[list[str]] = []
        self.fail_at: int | None = None
        self.error: BaseException | None = None

    def __call__(self, command: list[str]) -> int:
        self.commands.append(command)
        if "venv" in command:
            self.python.parent.mkdir(parents=True)
            self.python.touch()
        if len(self.commands) - 1 != self.fail_at:
            return 0
        if self.error:
            raise self.error
        return 3

    def summary(self) -> list[str]:
        """What each command so far was for; forgets them."""
        done = [_purpose(command) for command in self.commands]
        self.commands.clear()
        return done


def _purpose(command: list[str]) -> str:
    if "venv" in command:
        return "venv"
    if "--upgrade" in command:
        return "pip"
    kind = "point" if "--no-deps" in command else "install"
    return f"{kind} {Path(command[-1]).name}"


@pytest.fixture
def runner(tmp_path: Path) -> FakeRunner:
    return FakeRunner(tmp_path / "cache" / "venv" / "bin" / "python")


@pytest.fixture
def first(tmp_path: Path, runner: FakeRunner) -> Environment:
    (tmp_path / "cache").mkdir()
    return Environment(tmp_path / "cache" / "venv", tmp_path / "first", runner)


@pytest.fixture
def second(tmp_path: Path, first: Environment, runner: FakeRunner) -> Environment:
    """Another clone that shares the environment of `first`."""
    return Environment(first.venv, tmp_path / "second", runner)


def test_the_file_imports_the_standard_library_only() -> None:
    names = set()
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "relative").split(".")[0])
    assert names
    assert names <= sys.stdlib_module_names


def test_run_by_path_it_does_not_hide_the_standard_platform_module() -> None:
    probe = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]);"
        "path = sys.argv[2]; sys.argv[1:] = ['--help'];"
        "import contextlib;\n"
        "with contextlib.suppress(SystemExit):\n"
        "    runpy.run_path(path, run_name='__main__')\n"
        "import platform; print(platform.system())"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, str(SOURCE.parent), str(SOURCE)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("Linux\n")


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["deploy"], 2), (["--help"], 0)]
)
def test_without_a_known_command_it_prints_its_usage(
    arguments: list[str], code: int
) -> None:
    done = subprocess.run(
        [sys.executable, str(SOURCE), *arguments], capture_output=True, text=True
    )
    assert done.returncode == code
    assert "bootstrap.py demo" in (done.stderr if code else done.stdout)


def test_the_environment_changes_with_the_dependencies_and_the_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = {
        bootstrap.venv_path(b"one", (3, 11)),
        bootstrap.venv_path(b"two", (3, 11)),
        bootstrap.venv_path(b"one", (3, 12)),
    }
    assert len(paths) == 3
    assert {path.parent for path in paths} == {tmp_path / "sglang_taper"}
    assert bootstrap.venv_path(b"one", (3, 11)) in paths


def test_without_a_cache_setting_it_goes_below_the_home_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    path = bootstrap.venv_path(b"", (3, 11))
    assert path.parent == Path("/home/someone/.cache/sglang_taper")


def test_an_old_python_is_refused_with_both_versions_named() -> None:
    bootstrap.require_python((3, 11))
    bootstrap.require_python((4, 0))
    with pytest.raises(BootstrapError, match=r"3\.9 is too old: 3\.11 or newer"):
        bootstrap.require_python((3, 9))


def test_a_fresh_start_makes_everything_and_a_second_one_nothing(
    first: Environment, runner: FakeRunner
) -> None:
    assert not first.is_ready("test")
    os.close(bootstrap.lock_prepared(first, "test"))
    assert runner.summary() == ["venv", "pip", "install first[test]"]
    for extra in ("test", None):
        os.close(bootstrap.lock_prepared(first, extra))
    assert runner.summary() == []


def test_tests_after_a_demo_only_add_what_tests_need(
    first: Environment, runner: FakeRunner
) -> None:
    first.prepare(None)
    assert runner.summary() == ["venv", "pip", "install first"]
    assert not first.is_ready("test")
    first.prepare("test")
    assert runner.summary() == ["install first[test]"]
    assert first.is_ready("test")


def test_another_clone_is_pointed_at_without_dependencies_and_back_again(
    first: Environment, second: Environment, runner: FakeRunner
) -> None:
    first.prepare("test")
    runner.summary()
    for ours, other in ((second, first), (first, second)):
        ours.prepare("test")
        assert runner.summary() == [f"point {ours.clone.name}[test]"]
        assert ours.is_ready("test")
        assert not other.is_ready(None)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_failed_step_gives_its_exit_code_and_the_next_start_begins_anew(
    step: int, first: Environment, runner: FakeRunner
) -> None:
    runner.fail_at = step
    with pytest.raises(BootstrapError, match="failed") as caught:
        first.prepare(None)
    assert caught.value.code == 3
    assert "\n" not in str(caught.value)
    assert not first.is_ready(None)
    runner.fail_at = None
    runner.summary()
    first.prepare(None)
    assert runner.summary() == ["venv", "pip", "install first"]
    assert first.is_ready(None)


def test_interrupted_between_two_clones_it_serves_neither_but_keeps_its_packages(
    first: Environment, second: Environment, runner: FakeRunner
) -> None:
    first.prepare("test")
    runner.summary()
    runner.fail_at, runner.error = 0, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        second.prepare("test")
    assert not first.is_ready(None)
    assert not second.is_ready(None)
    runner.fail_at = None
    runner.summary()
    first.prepare("test")
    assert runner.summary() == ["point first[test]"]


def test_an_environment_whose_interpreter_is_gone_is_made_again(
    first: Environment, runner: FakeRunner
) -> None:
    first.prepare(None)
    runner.summary()
    first.python.unlink()
    assert not first.is_ready(None)
    first.prepare(None)
    assert runner.summary() == ["venv", "pip", "install first"]


def test_a_python_without_venv_is_told_which_package_to_install(
    first: Environment, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BootstrapError, match="python3-venv"):
        first.prepare(None)
    assert runner.commands == []


def test_too_small_a_disk_is_told_before_anything_is_downloaded(
    first: Environment, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        bootstrap.shutil, "disk_usage", lambda _: usage(10e9, 8e9, 2.04e9)
    )
    with pytest.raises(BootstrapError, match=r"2\.0 GB free and 12 GB are needed"):
        first.prepare(None)
    assert runner.commands == []


def test_the_demo_and_the_tests_run_from_the_environment(first: Environment) -> None:
    demo = bootstrap.final_command(first, "demo", ["--json", "x"])
    assert demo == [f"{first.venv}/bin/sglang-taper", "demo", "--json", "x"]
    tests = bootstrap.final_command(first, "test", ["-k", "y"])
    assert tests == [f"{first.venv}/bin/python", "-m", "pytest", "-k", "y"]


def test_an_error_ends_in_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(*_: object) -> int:
        raise BootstrapError("pip failed", 7)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bootstrap, "lock_prepared", fail)
    assert bootstrap.main(["demo"]) == 7
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "[sglang-taper] error: pip failed"


def _is_free(lock_file: Path) -> bool:
    with lock_file.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_run_keeps_the_lock_after_exec_and_another_clone_waits_for_its_end(
    first: Environment, second: Environment, runner: FakeRunner, tmp_path: Path
) -> None:
    first.prepare(None)
    program = (
        "import os, sys; from pathlib import Path; from sglang_taper import bootstrap;"
        "e = bootstrap.Environment(Path(sys.argv[1]), Path(sys.argv[2]));"
        "bootstrap.lock_prepared(e, None);"
        "os.execv('/bin/sh', ['sh', '-c', 'echo started; exec sleep 2'])"
    )
    command = [sys.executable, "-c", program, str(first.venv), str(first.clone)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "started\n"
        assert not _is_free(first.venv.with_suffix(".lock"))
        # A second run of the same clone goes ahead.
        os.close(bootstrap.lock_prepared(first, None))
        assert run.poll() is None
        lock = bootstrap.lock_prepared(second, None)
        assert runner.summary()[-1] == "point second"
        # The kernel gave us the lock, so the first run had ended.
        assert run.wait(timeout=1) == 0
        os.close(lock)
