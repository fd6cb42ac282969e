"""`sglang-taper calibrate` from its flags to its files, against a fake server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import PARAMS, FakeServer, law, serving

from sglang_taper import cli
from sglang_taper.calibrate import run
from sglang_taper.calibrate.session import POLICY, steps_of
from sglang_taper.policy.latency import StepLatencyModel
from sglang_taper.probe import Cell


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "can_plot", lambda: False)
    return tmp_path / "profile.json"


def calibrate(server: FakeServer, output: Path, *flags: str) -> int:
    command = ["calibrate", "--url", server.url, "--output", str(output), *flags]
    return cli.main(command)


def test_the_profile_is_one_that_a_server_starts_from(
    server: FakeServer, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(server, output) == 0
    profile = json.loads(output.read_text())
    model = StepLatencyModel.from_profile(profile)
    assert model.predict(8, 3000) == pytest.approx(law(8, 3000), rel=1e-3)
    assert model.trusted
    about = profile["calibration"]
    assert (about["model"], about["device"]) == ("fake", "cpu: imagined")
    assert about["versions"] == {"sglang": "0"}
    assert about["test_step_cost_ms"] == 0
    assert len(about["cells"]) == len(set(server.shown)) > 8
    assert {"num_rows", "num_tokens", "residual", "mape"} <= about["cells"][0].keys()
    out = capsys.readouterr().out
    assert "MAPE 0.0% on steps held out" in out
    assert str(output) in out
    assert "pip install 'sglang-taper[bench]'" in out
    assert sorted(output.parent.iterdir()) == [output]


def test_the_server_runs_every_row_meanwhile_and_has_its_policy_back(
    server: FakeServer, output: Path
) -> None:
    calibrate(server, output)
    assert server.policies == [POLICY, {name: PARAMS[name] for name in POLICY}]


def test_each_batch_is_shown_again_with_other_tokens(
    server: FakeServer, output: Path
) -> None:
    calibrate(server, output)
    half = len(server.shown) // 2
    assert server.shown[:half] == server.shown[half:]


def test_disturbed_steps_do_not_change_the_profile(output: Path) -> None:
    rng = random.Random(3)

    def disturbed(rows: int, kv_tokens: int) -> float:
        return law(rows, kv_tokens) * (30 if rng.random() < 0.08 else 1)

    with serving(FakeServer(disturbed)) as server:
        calibrate(server, output)
    model = StepLatencyModel.from_profile(json.loads(output.read_text()))
    assert model.predict(4, 2000) == pytest.approx(law(4, 2000), rel=0.01)


def test_a_run_that_fails_is_resumed_where_it_ended(
    server: FakeServer, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fails_after = 6
    assert calibrate(server, output) == 2
    assert "the server does not answer" in capsys.readouterr().err
    assert not output.exists()
    assert server.policies[-1]["policy"] == "taper"
    before = list(server.shown)
    server.fails_after = 1_000_000
    assert calibrate(server, output) == 0
    again = server.shown[len(before) :]
    assert again[0] == before[-1], "only the one that failed is shown again"
    num_cells = len(set(server.shown))
    assert len(again) == 2 * num_cells - (len(before) - 1)


def test_a_budget_that_is_spent_leaves_a_profile_and_the_rest_for_later(
    server: FakeServer,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=clock))
    assert calibrate(server, output, "--budget-s", "12") == 0
    first = len(server.shown)
    assert 3 <= first < 12
    assert "batches are left" in capsys.readouterr().out
    StepLatencyModel.from_profile(json.loads(output.read_text()))
    assert calibrate(server, output, "--budget-s", "1000") == 0
    assert len(server.shown) == 2 * len(set(server.shown))
    assert sorted(output.parent.iterdir()) == [output]


def test_data_parallel_ranks_are_refused(
    server: FakeServer, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.state_changes = {"dp_ranks": [{}, {}]}
    assert calibrate(server, output) == 2
    assert "a server without data parallelism" in capsys.readouterr().err


def test_a_plot_without_its_library_is_refused_before_anything_runs(
    server: FakeServer, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(server, output, "--plot", str(output) + ".png") == 2
    assert "matplotlib is missing" in capsys.readouterr().err
    assert server.shown == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--budget-s", "0"), "--budget-s=0.0"),
        (("--budget-s", "nan"), "--budget-s=nan"),
        (("--output", "/nowhere/at/all.json"), "--output="),
        (("--", "--tp-size", "2"), "server flags="),
    ],
)
def test_a_bad_flag_is_refused_naming_it(
    server: FakeServer,
    output: Path,
    flags: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert calibrate(server, output, *flags) == 2
    assert named in capsys.readouterr().err


def record(step: int, **changes: Any) -> dict[str, Any]:
    facts = {"num_rows": 4, "num_admitted": 4, "kv_tokens": 99, "measured_ms": 7.0}
    return {"step": step, **facts, **changes}


def test_only_whole_steps_of_the_batch_count_and_not_the_first() -> None:
    records = [
        record(1),
        record(2, num_rows=3, num_admitted=3),
        record(3),
        record(4),
        record(5, num_admitted=3),
        record(6, num_rows=5, num_admitted=5),
        record(7, measured_ms=None),
        record(8, measured_ms=9.0),
    ]
    steps = steps_of(Cell(4, 16), records, before=1)
    assert [step.step_ms for step in steps] == [7.0, 9.0]
