"""`sglang-taper calibrate` on a real engine, and a server that starts from it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from forking import branch_of, new_group, some_ids, together

from server import SMALL_POOL, Server, running_server

COMMAND = str(Path(sysconfig.get_path("scripts")) / "sglang-taper")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured for half a minute on a server of its own."""
    path = tmp_path_factory.mktemp("calibration") / "profile.json"
    command = [COMMAND, "calibrate", "--output", str(path), "--budget-s", "30"]
    done = subprocess.run(
        [*command, "--", *SMALL_POOL], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "MAPE" in done.stdout
    return path


def test_the_profile_says_what_was_measured_on_what(profile: Path) -> None:
    found = json.loads(profile.read_text())
    about = found["calibration"]
    assert "smollm2" in about["model"].lower()
    assert about["versions"].keys() == {"python", "sglang", "sglang-taper", "torch"}
    assert about["test_step_cost_ms"] == 0
    assert about["num_steps"] >= 32
    rows = {cell["num_rows"] for cell in about["cells"]}
    contexts = {cell["num_tokens"] for cell in about["cells"]}
    assert len(rows) > 1
    assert len(contexts) > 1
    assert found["a_ms"] + found["b_ms_per_row"] > 0
    assert 0 < found["mape"] < 0.5
    for cell in about["cells"]:
        assert cell["predicted_ms"] > 0


def test_a_server_starts_from_the_profile_instead_of_calibrating(
    profile: Path,
) -> None:
    with running_server("--latency-profile", str(profile)) as server:
        model = server.state()["latency_model"]
        written = json.loads(profile.read_text())
        assert model["trusted"]
        for name in ("a_ms", "b_ms_per_row", "c_ms_per_token"):
            # Its warm-up has been learned from already.
            assert model[name] == pytest.approx(written[name], rel=0.25, abs=0.01)
        assert "Calibrated the step-latency model" not in server.text_of_log()


def decode(server: Server, num_steps: int) -> list[dict[str, Any]]:
    """Four rows decode so many steps; what is known about these steps."""
    before = server.state()["counters"]["num_steps"]
    together(
        server,
        [
            branch_of(new_group(), some_ids(i, 12), max_new_tokens=num_steps)
            for i in range(4)
        ],
    )
    records = server.state()["recent_steps"]
    return [r for r in records if r["step"] > before and r["measured_ms"] is not None]


def error(steps: list[dict[str, Any]]) -> float | None:
    """Median error of the predictions; None: the model was not trusted to make any."""
    errors = [
        abs(step["predicted_ms"] / step["measured_ms"] - 1)
        for step in steps
        if step["predicted_ms"] is not None
    ]
    return statistics.median(errors) if errors else None


def assert_learned(steps: list[dict[str, Any]]) -> None:
    """At the end predictions are better by half, or none is relied on."""
    first, last = error(steps[2:8]), error(steps[-12:])
    assert first is None or last is None or last < first / 2


def test_an_engine_that_becomes_slower_is_noticed_and_learned(
    taper_server: Server,
) -> None:
    taper_server.set_policy(policy="eager")
    usual_ms = statistics.median(s["measured_ms"] for s in decode(taper_server, 40))
    drifts = taper_server.state()["latency_model"]["num_drifts"]
    cost_ms = min(1000, round(4 * usual_ms))
    state = taper_server.set_policy(test_step_cost_ms=cost_ms)
    assert state["params"]["test_step_cost_ms"] == cost_ms
    try:
        steps = decode(taper_server, 40)
    finally:
        taper_server.set_policy(test_step_cost_ms=0.0)
    assert all(step["measured_ms"] > cost_ms for step in steps[1:-1])
    slower = taper_server.state()["latency_model"]["num_drifts"]
    assert slower > drifts
    assert_learned(steps)
    back = decode(taper_server, 40)
    assert taper_server.state()["latency_model"]["num_drifts"] > slower
    assert_learned(back)
