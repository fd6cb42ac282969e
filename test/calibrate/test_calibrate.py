"""`sglang-taper calibrate` from its flags to its files, against a fake server."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import PARAMS, FakeServer, law, prefill_law, serving

from sglang_taper import cli, probe
from sglang_taper.calibrate import run
from sglang_taper.calibrate.session import POLICY, Session, steps_of
from sglang_taper.policy.latency import StepLatencyModel
from sglang_taper.probe import Cell
from sglang_taper.sim.machine import read_machine


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


def test_a_batch_that_does_not_end_in_time_is_aborted_and_what_it_told_counts(
    server: FakeServer, output: Path
) -> None:
    server.step_s = 0.05  # 15 steps in 0.75 s
    began = time.monotonic()
    assert calibrate(server, output, "--budget-s", "1.0") == 0
    assert time.monotonic() - began < 3
    assert len(server.shown) == 2
    assert len(server.aborted) == server.shown[1][0]
    assert server.num_flushes == 2
    cells = json.loads(output.read_text())["calibration"]["cells"]
    assert 0 < cells[1]["num_steps"] < cells[0]["num_steps"]


def test_the_profile_says_what_a_prefill_costs(
    server: FakeServer, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(server, output) == 0
    machine = read_machine(str(output))
    assert machine.prefill.duration_ms(100) == pytest.approx(prefill_law(100))
    assert "prefill = 30 ms + 500 ms * thousand tokens" in capsys.readouterr().out


def test_a_url_where_nobody_listens_is_one_sentence(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeServer()) as gone:
        pass
    assert calibrate(gone, output) == 2
    assert capsys.readouterr().err.endswith(f"no server answers at {gone.url}\n")


def test_an_interrupted_batch_leaves_nothing_in_the_server(
    server: FakeServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = probe.requests.post

    def interrupted(url: str, **kwargs: Any) -> Any:
        if url.endswith("/generate"):
            raise KeyboardInterrupt
        return post(url, **kwargs)

    monkeypatch.setattr(probe.requests, "post", interrupted)
    assert calibrate(server, output) == 130
    assert len(server.aborted) == 1
    assert server.num_flushes == 1
    assert server.policies[-1]["policy"] == "taper"


class StandIn:
    """Stands for the process of a server: the fake one, with the flags it got."""

    started: list[StandIn]

    def __init__(self, url: str, model_path: str, flags: list[str]) -> None:
        self.url, self.flags, self.log = url, flags, Path("its.log")
        self.profile = json.loads(Path(flags[1]).read_text())
        self.kept_log: bool | None = None
        self.started.append(self)

    async def ready(self, note: Any) -> None: ...

    def stop(self, keep_log: bool) -> None:
        self.kept_log = keep_log


@pytest.fixture
def started(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    StandIn.started = []
    monkeypatch.setattr(run, "ServerProcess", partial(StandIn, server.url))
    return StandIn.started


def test_a_server_of_its_own_is_started_with_the_flags_and_ended(
    started: list[StandIn], output: Path
) -> None:
    """It need not calibrate itself first: it gets some profile."""
    flags = ["--", "--tp-size", "2"]
    assert cli.main(["calibrate", "--output", str(output), *flags]) == 0
    (process,) = started
    assert process.flags[0] == "--latency-profile"
    assert process.flags[2:] == ["--tp-size", "2"]
    assert StepLatencyModel.from_profile(process.profile).graph_buckets == ()
    assert process.kept_log is False
    assert output.exists()


def test_the_log_of_a_server_that_fails_is_kept_and_named(
    server: FakeServer,
    started: list[StandIn],
    output: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.fails_after = 2
    assert cli.main(["calibrate", "--output", str(output)]) == 2
    assert "its log is its.log" in capsys.readouterr().err
    assert started[0].kept_log is True


def test_an_interrupted_run_ends_its_server_and_can_be_resumed(
    server: FakeServer,
    started: list[StandIn],
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "measure", interrupt)
        assert cli.main(["calibrate", "--output", str(output)]) == 130
    assert "the same command goes on" in capsys.readouterr().out
    assert started[0].kept_log is False
    assert server.policies[-1]["policy"] == "taper"
    assert not output.exists()


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
