"""Policies and front ends of other distributions: found, registered, or loudly not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distribution import documented, write_distribution
from sglang_taper import extensions
from sglang_taper.errors import ExtensionError
from sglang_taper.front_ends import registry
from sglang_taper.front_ends.types import Prompt
from sglang_taper.policy import admission


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that distributions are found in; what they register is forgotten."""
    monkeypatch.setattr(admission, "_factories", dict(admission._factories))
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(extensions, "_loaded", set())
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_documented_policy_and_front_end_are_short_and_work(folder: Path) -> None:
    files, points = documented()
    assert set(files) == {"small_batch", "two_views"}
    assert all(len(source.splitlines()) <= 20 for source in files.values())
    write_distribution(folder, files, points)
    extensions.load_extensions()
    assert "small-batch" in admission.policy_names()
    assert admission.make_policy("small-batch").plan(extensions._smallest_step()).rows
    program = registry.make_front_end("two-views").run(Prompt("Tea"))
    assert [part.lead for part in next(program)] == ["\nFor:", "\nAgainst:"]


def test_loading_twice_is_loading_once(folder: Path) -> None:
    write_distribution(folder, *documented())
    extensions.load_extensions()
    extensions.load_extensions()
    assert "two-views" in registry.front_end_names()


POLICY = "class P:\n    def plan(self, step): return ({})\n"
FRONT_END = "class F:\n    def run(self, prompt): return ({})\n"
PLAN = "from sglang_taper.policy.types import AdmissionPlan\n"
BAD = {
    "not importable": ("policies", "mine = mine_absent:P", "", "ModuleNotFoundError"),
    "no such object": ("policies", "mine = mine:Q", "", "has no attribute 'Q'"),
    "fails when imported": ("policies", "mine = mine:P", "1 / 0", "ZeroDivisionError"),
    "name of ours": (
        "policies",
        "eager = mine:P",
        PLAN + POLICY.format("AdmissionPlan([0], 'all')"),
        "a name that is not registered yet",
    ),
    "name not allowed": (
        "policies",
        "Mine = mine:P",
        PLAN + POLICY.format("AdmissionPlan([0], 'all')"),
        "policy='Mine' is not valid",
    ),
    "no plan": ("policies", "mine = mine:P", "P = object", "has no attribute 'plan'"),
    "plan of nothing": (
        "policies",
        "mine = mine:P",
        POLICY.format("None"),
        "must return an AdmissionPlan, not None",
    ),
    "plan without the row that must run": (
        "policies",
        "mine = mine:P",
        PLAN + POLICY.format("AdmissionPlan([1], 'all')"),
        "rows [0] or [0, 1] of a step were expected, not [1]",
    ),
    "front end of ours": (
        "front_ends",
        "threadweaver = mine:F",
        FRONT_END.format("(yield)"),
        "a name that is not registered yet",
    ),
    "no generator": (
        "front_ends",
        "mine = mine:F",
        FRONT_END.format("[prompt]"),
        "run() must be a generator",
    ),
    "no run": ("front_ends", "mine = mine:F", "F = object", "no attribute 'run'"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_with_entry_point_and_distribution(
    folder: Path, what: str
) -> None:
    group, point, source, reason = BAD[what]
    write_distribution(folder, {"mine": source}, {f"sglang_taper.{group}": [point]})
    with pytest.raises(ExtensionError) as error:
        extensions.load_extensions()
    assert str(error.value).startswith(f"entry point {point} of taper-test-extension")
    assert f"in sglang_taper.{group}: " in str(error.value)
    assert reason in str(error.value)


def simulate(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", CLI, *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


CLI = "import sys; from sglang_taper.cli import main; sys.exit(main())"
SIMULATE = ("simulate", "--num-prompts", "6", "--tpot-slo-ms", "60", "--policies")


def test_simulate_takes_a_policy_of_the_users_own(tmp_path: Path) -> None:
    write_distribution(tmp_path, *documented())
    done = simulate(tmp_path, *SIMULATE, "eager,small-batch")
    assert done.returncode == 0, done.stderr
    assert "small-batch" in done.stdout


def test_simulate_ends_with_code_2_where_an_extension_is_wrong(tmp_path: Path) -> None:
    write_distribution(
        tmp_path, {"mine": ""}, {"sglang_taper.policies": ["mine = mine:P"]}
    )
    done = simulate(tmp_path, *SIMULATE, "eager")
    assert done.returncode == 2
    assert "entry point mine = mine:P of taper-test-extension" in done.stderr
