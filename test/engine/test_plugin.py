"""The plugin in the processes SGLang starts: what it installs, and how it fails."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_taper.engine import compat, plugin
from sglang_taper.engine.attention_rows import CUDA_ATTENTION_HOOKS
from sglang_taper.engine.hooks import HOOKS, Kind, Role, hook
from sglang_taper.errors import HookError

FLAG_TARGETS = {row.target for row in HOOKS if row.always and row.kind is Kind.AROUND}
FLAG_TARGETS |= {row.target for row in HOOKS if row.always and row.kind is Kind.AFTER}


def test_rows_have_unique_ids_and_targets() -> None:
    assert len({row.id for row in HOOKS}) == len(HOOKS)
    assert len({row.target for row in HOOKS}) == len(HOOKS)


def test_only_the_flags_exist_with_policy_none() -> None:
    assert {row.id for row in HOOKS if row.always} == {
        "flags",
        "settings",
        "engine-keywords",
        "refusals",
    }


def test_every_row_is_fingerprinted() -> None:
    assert set(compat.expected_fingerprints()) == {row.target for row in HOOKS}


def test_a_changed_function_is_named() -> None:
    row = hook("scheduler-update-running-batch")
    with pytest.raises(HookError, match="update_running_batch has changed"):
        plugin.check_fingerprint(row, {row.target: "0" * 16})


def test_a_missing_function_is_named() -> None:
    with pytest.raises(HookError, match="no_such_method is not defined there"):
        compat.fingerprint("sglang.srt.managers.scheduler.Scheduler.no_such_method")


def test_another_version_of_sglang_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(compat, "SGLANG_VERSION", "0.5.22")
    with pytest.raises(HookError, match=r"needs sglang==0\.5\.22, found 0\.5\.23"):
        compat.check_version()


def our_targets() -> list[str]:
    """Targets with a hook of ours in this process; other plugins have theirs."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(hook.__module__.startswith("sglang_taper.") for _, hook, _ in hooks)
        and target in HookRegistry._patched
    )


def run_scheduler_process(queue: Any) -> None:
    """What SGLang's function of this name does before it builds a Scheduler."""
    import sglang.srt.managers.scheduler as module
    from sglang.srt.plugins import load_plugins

    load_plugins()
    queue.put((module.Scheduler.__module__, our_targets()))


def run_child(target: Any, policy: str) -> tuple[str, list[str]]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    os.environ["SGLANG_TAPER_BRANCH_POLICY"] = policy
    try:
        child = context.Process(target=target, args=(queue,))
        child.start()
        found = queue.get(timeout=120)
        child.join()
    finally:
        del os.environ["SGLANG_TAPER_BRANCH_POLICY"]
    return found  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_scheduler_process_is_stock_with_policy_none() -> None:
    module, patched = run_child(run_scheduler_process, "none")
    assert module == "sglang.srt.managers.scheduler"
    assert patched == []


@pytest.mark.slow
def test_a_scheduler_process_runs_our_class_with_a_policy() -> None:
    module, patched = run_child(run_scheduler_process, "off")
    wanted = {
        row.target
        for row in HOOKS
        if row.role is Role.SCHEDULER
        and row.kind not in (Kind.OVERRIDE, Kind.RELIED_ON)
        and (row not in CUDA_ATTENTION_HOOKS or torch.cuda.is_available())
    }
    assert module == "sglang_taper.engine.scheduler"
    assert set(patched) == wanted


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_detokenizer_process(queue: Any) -> None:
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    queue.put(("", our_targets()))


@pytest.mark.slow
def test_a_detokenizer_process_is_left_alone() -> None:
    assert run_child(run_detokenizer_process, "off") == ("", [])


@pytest.mark.slow
def test_the_main_process_has_only_flag_hooks_with_policy_none() -> None:
    code = (
        "from sglang.srt.server_args import prepare_server_args\n"
        "from sglang.srt.plugins import load_plugins\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_plugin import our_targets\n"
        "load_plugins(); prepare_server_args(['--model-path', 'x'])\n"
        "print(our_targets())\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sorted(FLAG_TARGETS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["sglang_taper.launch_server", "sglang.launch_server"]
)
def test_a_changed_sglang_ends_the_start_with_code_2(module: str) -> None:
    code = (
        "import sys, runpy\n"
        "from sglang_taper.engine import compat\n"
        "compat.expected_fingerprints = lambda: {}\n"
        f"sys.argv = ['x', '--model-path', 'x', '--branch-policy', 'taper']\n"
        f"runpy.run_module('{module}', run_name='__main__')\n"
    )
    done = run_python(code)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "sglang_taper: error: hook" in done.stderr
    assert "has changed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_whitelist_without_us_ends_the_start_with_code_2() -> None:
    command = [sys.executable, "-m", "sglang_taper.launch_server", "--model-path", "x"]
    done = subprocess.run(
        command,
        env={**os.environ, "SGLANG_PLUGINS": "another"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "did not load the plugin sglang_taper" in done.stderr
