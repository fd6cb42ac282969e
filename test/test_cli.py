"""The console script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_taper import __version__, cli
from sglang_taper.engine.hooks import HOOKS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


def test_an_unknown_command_is_refused_with_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fly"])
    assert stopped.value.code == 2
    assert "fly" in capsys.readouterr().err


@pytest.mark.slow
def test_check_finds_every_hook_in_place(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    done = run_check("pass", str(file))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    facts = json.loads(file.read_text())
    assert facts["ok"]
    assert {hook["id"] for hook in facts["hooks"]} == {row.id for row in HOOKS}
    assert {hook["state"] for hook in facts["hooks"]} == {"ok"}
    assert all(row.id in done.stdout for row in HOOKS)


def test_check_prints_json_where_no_file_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"ok": True, "problem": None, "hooks": []}
    monkeypatch.setattr("sglang_taper.engine.check.check_hooks", lambda: facts)
    assert cli.main(["check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts


@pytest.mark.slow
def test_check_names_a_changed_hook_and_ends_with_code_2(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    spoil = (
        "from sglang_taper.engine import compat\n"
        "expected = compat.expected_fingerprints()\n"
        "expected['sglang.srt.managers.scheduler.Scheduler.run_batch'] = 'other'\n"
        "compat.expected_fingerprints = lambda: expected"
    )
    done = run_check(spoil, str(file))
    assert done.returncode == 2
    states = {h["id"]: h["state"] for h in json.loads(file.read_text())["hooks"]}
    assert "has changed" in states["scheduler-run-batch"]
    assert "NOT in place" in done.stdout


def run_check(before: str, file: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"{before}\nimport sys\nfrom sglang_taper.cli import main\n"
        f"sys.exit(main(['check', '--json', {file!r}]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_interrupted_command_says_so_and_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_taper.sim.command.run_sweep", interrupted)
    assert cli.main(["simulate"]) == 130
    assert capsys.readouterr().err == "sglang-taper: interrupted\n"
