"""The timeline of one request or branch: `GET /taper/requests/{id}`.

All times are milliseconds since the request arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from sglang_taper.engine.records import AWAY, DEFERRED, RUNNING, BranchRecord, Mark
from sglang_taper.engine.report import request_figures

QUEUED, PREFILL, DONE, ABORTED = "queued", "prefill", "done", "aborted"
FORGOTTEN = "forgotten"


def describe_request(
    records: Sequence[BranchRecord], id: str, now_ms: float, waiting: Iterable[str]
) -> dict[str, Any]:
    """JSON-safe timeline of the request `id` or of one branch; {} when unknown.

    `records` are those of `id`, `waiting` the request ids in the waiting queue.
    """
    if not records:
        return {}
    origin_ms = records[0].state.request.arrival_ms
    queue = frozenset(waiting)
    return {
        "id": id,
        "kind": "request" if records[0].shown_request == id else "branch",
        "now_ms": now_ms - origin_ms,
        "request": describe_owner(records[0]),
        "forks": list(_forks(records, origin_ms)),
        "branches": [_describe_record(r, origin_ms, now_ms, queue) for r in records],
    }


def describe_owner(record: BranchRecord) -> dict[str, Any]:
    """The request that a branch belongs to."""
    return {
        "id": record.shown_request,
        "is_group": record.meta.group is not None,
        **request_figures(record.state.request),
    }


def _describe_record(
    record: BranchRecord, origin_ms: float, now_ms: float, waiting: frozenset[str]
) -> dict[str, Any]:
    meta, state = record.meta, record.state
    spans = list(_spans(record, now_ms))
    for span in spans:
        span["from_ms"] -= origin_ms
        span["to_ms"] -= origin_ms
    return {
        "rid": record.rid,
        "parent": meta.parent,
        "branch": meta.branch,
        "width": meta.width,
        "depth": meta.depth,
        "stage": meta.stage,
        "is_prefix_only": state.max_new_tokens == 0,
        "status": status_of(record, waiting),
        "finish": record.finish,
        "arrived_ms": record.arrived_ms - origin_ms,
        "ended_ms": _since(record.ended_ms, origin_ms),
        "output_tokens": state.output_tokens,
        "steps_run": state.steps_run,
        "steps_deferred": state.steps_deferred,
        **record.figures,
        "num_spans_forgotten": record.num_marks - len(record.marks),
        "spans": spans,
    }


def _since(moment_ms: float | None, origin_ms: float) -> float | None:
    return None if moment_ms is None else moment_ms - origin_ms


def status_of(record: BranchRecord, waiting: frozenset[str]) -> str:
    """What it is doing now."""
    if record.ended_ms is not None:
        return DONE if record.finish in ("stop", "length") else ABORTED
    if record.rid in waiting:
        return QUEUED
    if record.first_token_ms is None:
        return PREFILL
    status = record.marks[-1].status if record.marks else RUNNING
    # Back from the queue, and not in a decode step yet.
    return PREFILL if status == AWAY else status


def _spans(record: BranchRecord, now_ms: float) -> Iterator[dict[str, Any]]:
    end_ms = now_ms if record.ended_ms is None else record.ended_ms
    marks = list(record.marks)
    # With overlap a step is planned before the result of the prefill has come.
    began = [record.first_token_ms, marks[0].now_ms if marks else None]
    decode_ms = min((ms for ms in began if ms is not None), default=None)
    before_ms = end_ms if decode_ms is None else decode_ms
    admitted_ms = record.admitted_ms
    if admitted_ms is None:
        yield _span(QUEUED, record.arrived_ms, before_ms)
    else:
        admitted_ms = min(admitted_ms, before_ms)
        yield _span(QUEUED, record.arrived_ms, admitted_ms)
        yield _span(PREFILL, admitted_ms, before_ms)
    if decode_ms is not None:
        yield from _decode_spans(record, marks, decode_ms, end_ms)


def _decode_spans(
    record: BranchRecord, marks: list[Mark], began_ms: float, end_ms: float
) -> Iterator[dict[str, Any]]:
    """A branch runs until its first mark, unless that is forgotten."""
    known_ms = marks[0].now_ms if marks else end_ms
    if known_ms > began_ms:
        is_known = record.num_marks == len(marks)
        yield _span(RUNNING if is_known else FORGOTTEN, began_ms, known_ms)
    for mark, following in pairwise([*marks, None]):
        assert mark is not None
        if following is None:
            yield _decode_span(mark, end_ms, record.last_step)
        elif following.step > mark.step:
            yield _decode_span(mark, following.now_ms, following.step - 1)


def _span(status: str, from_ms: float, to_ms: float) -> dict[str, Any]:
    return {"status": status, "from_ms": from_ms, "to_ms": max(from_ms, to_ms)}


def _decode_span(mark: Mark, to_ms: float, to_step: int | None) -> dict[str, Any]:
    span = _span(mark.status, mark.now_ms, to_ms)
    span |= {"from_step": mark.step, "to_step": to_step}
    if mark.status == DEFERRED:
        span |= {
            "reason": mark.reason,
            "budget_ms": mark.budget_ms,
            "urgent": mark.urgent,
            "urgent_slack_ms": mark.urgent_slack_ms,
        }
    return span


def _forks(
    records: Sequence[BranchRecord], origin_ms: float
) -> Iterator[dict[str, Any]]:
    """Each fork with its opening, the end of its last branch, and its join: the first
    branch that then came above it."""
    forks: dict[tuple[int, int, str | None], list[BranchRecord]] = {}
    for record in records:
        meta = record.meta
        if meta.width > 1 and record.state.max_new_tokens:
            forks.setdefault((meta.depth, meta.stage, meta.parent), []).append(record)
    for (depth, stage, parent), branches in forks.items():
        ends = [b.ended_ms for b in branches if b.ended_ms is not None]
        is_over = len(ends) == len(branches) >= branches[0].meta.width
        ended_ms = max(ends) if is_over else None
        join = None if ended_ms is None else _join_of(records, depth, ended_ms)
        yield {
            "depth": depth,
            "stage": stage,
            "parent": parent,
            "width": branches[0].meta.width,
            "num_ended": len(ends),
            "opened_ms": branches[0].arrived_ms - origin_ms,
            "ended_ms": _since(ended_ms, origin_ms),
            "joined_by": join.rid if join else None,
            "joined_ms": join.arrived_ms - origin_ms if join else None,
        }


def _join_of(
    records: Sequence[BranchRecord], depth: int, ended_ms: float
) -> BranchRecord | None:
    return next(
        (r for r in records if r.meta.depth < depth and r.arrived_ms >= ended_ms), None
    )
