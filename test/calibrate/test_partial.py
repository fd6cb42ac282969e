"""What a calibration leaves on disk while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_taper.calibrate.fit import CellSteps, TimedStep
from sglang_taper.calibrate.partial import PartialResults
from sglang_taper.errors import FieldError
from sglang_taper.probe import Cell

SUBJECT = {"engine": {"model": "fake"}, "graph_buckets": [1, 2]}
FIRST = CellSteps(Cell(1, 16), 0.5, [TimedStep(1, 17, 20.25)])
SECOND = CellSteps(Cell(2, 16), 0.7, [])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json.partial"


def test_what_was_added_is_there_in_the_next_run(path: Path) -> None:
    results = PartialResults(path, SUBJECT)
    results.add(FIRST)
    results.add(SECOND)
    assert PartialResults(path, dict(SUBJECT)).cells == [FIRST, SECOND]


def test_a_line_that_was_cut_costs_only_itself(path: Path) -> None:
    results = PartialResults(path, SUBJECT)
    results.add(FIRST)
    results.add(SECOND)
    path.write_bytes(path.read_bytes()[:-9])
    resumed = PartialResults(path, SUBJECT)
    assert resumed.cells == [FIRST]
    resumed.add(SECOND)
    assert PartialResults(path, SUBJECT).cells == [FIRST, SECOND]


def test_results_of_another_server_are_not_mixed_in(path: Path) -> None:
    PartialResults(path, SUBJECT).add(FIRST)
    before = path.read_bytes()
    with pytest.raises(FieldError, match="partial results="):
        PartialResults(path, {**SUBJECT, "graph_buckets": []})
    assert path.read_bytes() == before


def test_an_empty_file_is_a_beginning(path: Path) -> None:
    path.touch()
    PartialResults(path, SUBJECT).add(FIRST)
    assert PartialResults(path, SUBJECT).cells == [FIRST]


def test_nothing_is_left_once_it_is_removed(path: Path) -> None:
    PartialResults(path, SUBJECT).remove()
    assert not path.exists()
