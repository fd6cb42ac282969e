"""`benchmark/step_model.py replay`, and what it says to files that hold no steps."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from step_model import Replay, read_steps


def write_steps(file: Path, count: int) -> Path:
    steps = [
        {"num_admitted": 1 + i % 7, "kv_tokens": 90 * i, "measured_ms": 5.0 + i % 7}
        for i in range(count)
    ]
    file.write_text("\n".join(map(json.dumps, steps)))
    return file


def test_a_step_is_predicted_before_it_is_seen(tmp_path: Path) -> None:
    replay = Replay(read_steps(write_steps(tmp_path / "steps", 100)))
    assert len(replay.errors) == 100 - 16
    assert max(replay.errors) < 0.01
    assert replay.range_of("b_ms_per_row") == pytest.approx((1.0, 1.0), rel=0.01)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "7"])
def test_a_file_without_steps_is_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "steps"
    file.write_text(text)
    with pytest.raises(SystemExit, match=str(file)):
        read_steps(file)
    with pytest.raises(SystemExit, match="nosuch"):
        read_steps(tmp_path / "nosuch")


@pytest.mark.parametrize(
    "wrong",
    [{"num_admitted": 0}, {"measured_ms": 0}, {"measured_ms": None}, {"kv_tokens": -1}],
)
def test_steps_that_no_server_runs_are_one_sentence_too(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    step = {"num_admitted": 2, "kv_tokens": 9, "measured_ms": 5.0}
    file = tmp_path / "steps"
    file.write_text("\n".join(map(json.dumps, [step] * 20 + [step | wrong])))
    with pytest.raises(SystemExit, match="no steps"):
        read_steps(file)


def test_too_few_steps_are_said_to_be_too_few(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="16 steps"):
        read_steps(write_steps(tmp_path / "steps", 16))


def test_steps_of_a_machine_that_others_use_too_are_predicted() -> None:
    """Recorded: demos on two cores, and in the second half two programs beside them
    that are busy for a while and idle for a while."""
    file = Path(__file__).with_name("steps_of_a_shared_machine.jsonl")
    replay = Replay(read_steps(file))
    assert len(replay.errors) > 1500
    assert fmean(replay.errors) < 0.11
    # The machine becomes up to twice as slow; a row never costs nothing.
    row_ms = replay.coefficients["b_ms_per_row"]
    assert max(row_ms) < 4 * min(row_ms)
