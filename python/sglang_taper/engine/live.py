"""What the page shows: `GET /taper/live`. Ids, statuses and numbers; no text.

Tables are columns (one list per key), because a thousand branches are sent once a
second while somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

import sglang_taper
from sglang_taper.engine.controller import BranchController
from sglang_taper.engine.counters import StepRecord
from sglang_taper.engine.explain import describe_owner, status_of
from sglang_taper.engine.records import DEFERRED, BranchRecord, Mark
from sglang_taper.engine.report import describe_params

MAX_BRANCHES = 4096
STEP_KEYS = (
    *("step", "now_ms", "reason", "num_requests", "num_rows", "num_admitted"),
    *("predicted_ms", "measured_ms", "baseline_ms", "budget_ms", "min_slack_ms"),
)


def describe_live(
    controller: BranchController, after_step: int, waiting: Iterable[str]
) -> dict[str, Any]:
    """JSON-safe. Steps up to `after_step` are left out; `waiting` are the request ids
    in the waiting queue."""
    now_ms = controller.clock.now_ms
    steps = [s for s in controller.counters.recent_steps if s.step > after_step]
    marks = MarkTable()
    requests, num_left_out = _requests(controller, now_ms, frozenset(waiting), marks)
    return {
        "version": sglang_taper.__version__,
        "now_ms": now_ms,
        "step": controller.step,
        "params": describe_params(controller),
        "latency_model": {
            "trusted": controller.model.trusted,
            "mape": controller.model.mape,
        },
        "service": controller.recorder.attainment.in_window(now_ms),
        "num_live_groups": controller.groups.num_live_groups,
        "num_pins": len(controller.pins),
        "pinned_tokens": controller.pins.num_tokens,
        "steps": describe_steps(steps),
        "requests": requests,
        "num_requests_left_out": num_left_out,
        "deferrals": [msgspec.to_builtins(mark) for mark in marks.marks],
    }


def describe_steps(steps: Sequence[StepRecord]) -> dict[str, list[Any]]:
    return {key: [getattr(step, key) for step in steps] for key in STEP_KEYS}


class MarkTable:
    """Numbers the marks that branches share."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._index: dict[int, int] = {}

    def number(self, mark: Mark) -> int:
        if id(mark) not in self._index:
            self._index[id(mark)] = len(self.marks)
            self.marks.append(mark)
        return self._index[id(mark)]


def _requests(
    controller: BranchController,
    now_ms: float,
    waiting: frozenset[str],
    marks: MarkTable,
) -> tuple[list[dict[str, Any]], int]:
    """The oldest requests with a living branch, and how many had no place."""
    book = controller.recorder.book
    described: list[dict[str, Any]] = []
    num_branches = 0
    ids = book.living_requests()
    for id in ids:
        records = book.of(id)
        num_branches += len(records)
        if described and num_branches > MAX_BRANCHES:
            break
        described.append(_describe(records, now_ms, waiting, marks))
    return described, len(ids) - len(described)


def _describe(
    records: list[BranchRecord],
    now_ms: float,
    waiting: frozenset[str],
    marks: MarkTable,
) -> dict[str, Any]:
    shown = [record for record in records if record.state.max_new_tokens]
    return {
        **describe_owner(records[0]),
        "age_ms": now_ms - records[0].state.request.arrival_ms,
        "branches": _columns(shown, waiting, marks),
    }


def _columns(
    records: Sequence[BranchRecord], waiting: frozenset[str], marks: MarkTable
) -> dict[str, list[Any]]:
    statuses = [status_of(record, waiting) for record in records]
    return {
        "rid": [record.rid for record in records],
        "parent": [record.meta.parent for record in records],
        "branch": [record.meta.branch for record in records],
        "width": [record.meta.width for record in records],
        "depth": [record.meta.depth for record in records],
        "stage": [record.meta.stage for record in records],
        "status": statuses,
        "output_tokens": [record.state.output_tokens for record in records],
        "steps_run": [record.state.steps_run for record in records],
        "steps_deferred": [record.state.steps_deferred for record in records],
        "deferral": list(_deferrals(records, statuses, marks)),
    }


def _deferrals(
    records: Sequence[BranchRecord], statuses: Sequence[str], marks: MarkTable
) -> Iterator[int | None]:
    """For a deferred branch the number of its mark."""
    for record, status in zip(records, statuses, strict=True):
        yield marks.number(record.marks[-1]) if status == DEFERRED else None
