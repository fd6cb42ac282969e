"""What is remembered of each branch: spans, bounds, and what it costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_taper.engine import records as module
from sglang_taper.engine.records import (
    AWAY,
    DEFERRED,
    MAX_MARKS,
    RUNNING,
    BranchRecord,
    Mark,
    RecordBook,
)
from sglang_taper.policy.state import BranchState, RequestState
from sglang_taper.protocol import BranchMeta


class Batch:
    """Rows of one request in a book, stepped by hand: a step lasts 10 ms."""

    def __init__(self, num_rows: int, group: str | None = "g") -> None:
        self.book = RecordBook()
        self.step = 0
        self.asked = 0
        owner = RequestState(group or "rid-0", 0.0, 2000.0, 50.0)
        self.rows = [self._row(owner, group, i, num_rows) for i in range(num_rows)]
        self.changed = True

    def _row(self, owner: RequestState, group: str | None, i: int, width: int) -> Any:
        meta = BranchMeta(group=group, branch=i, width=width, depth=1)
        record = BranchRecord(f"rid-{i}", meta, BranchState(owner, i, 0, 8), 0.0)
        record.first_token_ms = 0.0
        self.book.open(record)
        return SimpleNamespace(taper=SimpleNamespace(record=record))

    def records(self) -> list[BranchRecord]:
        return [row.taper.record for row in self.rows]

    def run(self, *left_out: int, reason: str = "budget") -> None:
        self.step += 1
        now_ms = 10.0 * self.step
        mark = Mark(self.step, now_ms, DEFERRED, reason, 21.0)
        self.book.note_step(self.rows, self.changed, set(left_out), mark, self._urgent)
        self.changed = False

    def _urgent(self) -> tuple[str, float]:
        self.asked += 1
        return "urgent", 4.0

    def remove(self, row: int) -> Any:
        self.changed = True
        return self.rows.pop(row)


def statuses(record: BranchRecord) -> list[tuple[int, str]]:
    return [(mark.step, mark.status) for mark in record.marks]


def test_steps_in_which_all_rows_run_leave_no_trace() -> None:
    batch = Batch(3)
    for _ in range(5):
        batch.run()
    assert [statuses(record) for record in batch.records()] == [[], [], []]
    assert batch.asked == 0


def test_consecutive_steps_with_the_same_status_are_one_mark() -> None:
    batch = Batch(2)
    for left_out in ([1], [1], [1], [], [], [0]):
        batch.run(*left_out)
    first, second = batch.records()
    assert statuses(first) == [(6, DEFERRED)]
    assert statuses(second) == [(1, DEFERRED), (4, RUNNING)]
    assert second.marks[0].reason == "budget"
    assert second.marks[0].urgent == "urgent"
    assert second.marks[0].urgent_slack_ms == 4.0


def test_another_reason_begins_another_span() -> None:
    batch = Batch(2)
    batch.run(1)
    batch.run(1, reason="fallback")
    assert [mark.reason for mark in batch.records()[1].marks] == ["budget", "fallback"]


def test_rows_that_change_together_share_their_mark() -> None:
    batch = Batch(64)
    batch.run(*range(1, 64))
    batch.run(*range(63))
    marks = {id(mark) for record in batch.records() for mark in record.marks}
    assert len(marks) == 3


def test_a_retracted_branch_is_away_until_it_runs_again() -> None:
    batch = Batch(3)
    batch.run(2)
    row = batch.remove(2)
    batch.run()
    batch.rows.append(row)
    batch.changed = True
    batch.run()
    record = row.taper.record
    assert statuses(record) == [(1, DEFERRED), (2, AWAY), (3, RUNNING)]


def test_a_branch_that_ended_while_deferred_gets_no_further_mark() -> None:
    batch = Batch(2)
    batch.run(1)
    record = batch.remove(1).taper.record
    batch.book.close(record, 15.0, "abort")
    batch.run()
    assert statuses(record) == [(1, DEFERRED)]
    assert (record.ended_ms, record.finish) == (15.0, "abort")


def test_the_oldest_spans_of_a_branch_are_forgotten_and_counted() -> None:
    batch = Batch(2)
    for step in range(2 * MAX_MARKS):
        batch.run(step % 2)
    record = batch.records()[0]
    assert len(record.marks) == MAX_MARKS
    assert record.num_marks - len(record.marks) == MAX_MARKS
    assert record.marks[-1].step == batch.step


def test_a_request_is_found_by_its_group_and_a_branch_by_its_own_id() -> None:
    batch = Batch(3)
    assert batch.book.find("g") == batch.records()
    assert batch.book.find("rid-1") == [batch.records()[1]]
    assert batch.book.find("nobody") == []


def test_whose_group_it_is_needs_no_naming_and_is_not_shown() -> None:
    batch = Batch(2, group="0123abcd/g")
    assert batch.book.find("g") == batch.book.of("0123abcd/g") == batch.records()
    assert batch.records()[0].shown_request == "g"
    assert batch.book.of("g") == []


def test_a_request_without_a_group_is_found_by_its_id() -> None:
    batch = Batch(1, group=None)
    assert batch.book.find("rid-0") == batch.records()
    assert batch.book.living_requests() == ["rid-0"]


def test_ended_branches_are_remembered_up_to_a_bound_and_then_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_ENDED_RECORDS", 2)
    batch = Batch(4)
    for record in batch.records()[:3]:
        batch.book.close(record, 1.0, "stop")
    assert batch.book.find("rid-0") == []
    assert [record.rid for record in batch.book.find("g")] == [
        f"rid-{i}" for i in (1, 2, 3)
    ]
    batch.book.close(batch.records()[3], 1.0, "stop")
    assert [record.rid for record in batch.book.find("g")] == ["rid-2", "rid-3"]


def test_what_ended_branches_may_hold_is_bounded_by_their_marks_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_ENDED_MARKS", 3)
    batch = Batch(3)
    batch.run(1, 2)
    batch.run(0)
    for record in batch.records():
        batch.book.close(record, 1.0, "stop")
    # One, two and two marks: only the last two marks fit.
    assert [record.rid for record in batch.book.find("g")] == ["rid-2"]


def test_a_branch_that_comes_again_with_the_same_id_takes_the_place_of_the_first() -> (
    None
):
    batch = Batch(1)
    old = batch.records()[0]
    batch.book.close(old, 5.0, "stop")
    new = batch.book.open(BranchRecord("rid-0", old.meta, old.state, 6.0))
    assert batch.book.find("rid-0") == [new]
    batch.book._forget(old)
    assert batch.book.find("rid-0") == [new]


def test_who_left_in_an_unusual_way_is_closed_when_the_engine_is_idle() -> None:
    batch = Batch(2)
    batch.book.settle(99.0)
    assert [record.finish for record in batch.records()] == ["unknown", "unknown"]
    assert batch.book.living_requests() == []
