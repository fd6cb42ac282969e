"""What happened to each branch, step by step, in bounded memory.

A branch gets a `Mark` only where its status changes: consecutive steps with the same
status and reason are one span (run-length coding), and all branches that change in a
step share the mark. A step in which nothing is deferred costs nothing here. No token
and no text is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

import msgspec

from sglang_taper.engine.headers import id_in
from sglang_taper.policy.state import BranchState
from sglang_taper.protocol import BranchMeta

RUNNING, DEFERRED, AWAY = "running", "deferred", "away"
# Of a branch; older ones are forgotten first.
MAX_MARKS = 256
# Of ended branches: what is remembered of them in all.
MAX_ENDED_RECORDS, MAX_ENDED_MARKS = 8192, 100_000


class Mark(msgspec.Struct, frozen=True, gc=False):
    """From decode step `step` on a branch is `status`.

    `reason` is what bound that step. `urgent` is the request whose next token was due
    first, in `urgent_slack_ms`; `budget_ms` what the step might take. None where the
    policy has no budget.
    """

    step: int
    now_ms: float
    status: str
    reason: str | None = None
    budget_ms: float | None = None
    urgent: str | None = None
    urgent_slack_ms: float | None = None


class BranchRecord:
    """One branch from its arrival on; times in ms on the step clock.

    `admitted_ms`: its prefill, or its decode row, began. `last_step` is the last decode
    step that it had a row in, once it has ended. `finish` is SGLang's type of
    finish reason, None while it lives; `figures` are those of its answer.
    """

    __slots__ = (
        "admitted_ms",
        "arrived_ms",
        "ended_ms",
        "figures",
        "finish",
        "first_token_ms",
        "last_step",
        "marks",
        "meta",
        "num_marks",
        "rid",
        "state",
    )

    def __init__(
        self, rid: str, meta: BranchMeta, state: BranchState, arrived_ms: float
    ) -> None:
        self.rid, self.meta, self.state = rid, meta, state
        self.arrived_ms = arrived_ms
        self.admitted_ms: float | None = None
        self.first_token_ms: float | None = None
        self.ended_ms: float | None = None
        self.last_step: int | None = None
        self.finish: str | None = None
        self.figures: dict[str, Any] = {}
        self.marks: deque[Mark] = deque(maxlen=MAX_MARKS)
        self.num_marks = 0

    @property
    def request(self) -> str:
        """The name of its request: its group, or its own where it has none."""
        return self.meta.group or self.rid

    @property
    def shown_request(self) -> str:
        """The same as clients call it."""
        return id_in(self.meta.group) if self.meta.group else self.rid

    def add(self, mark: Mark) -> None:
        self.marks.append(mark)
        self.num_marks += 1


class RecordBook:
    """The records of one scheduler: of all living branches, and of the newest ended."""

    def __init__(self) -> None:
        # By id of a request: its branches by rid, in order of arrival.
        self.requests: dict[str, dict[str, BranchRecord]] = {}
        self._request_of: dict[str, str] = {}
        self._living: set[BranchRecord] = set()
        self._ended: deque[BranchRecord] = deque()
        self._num_ended_marks = 0
        # Of the last step: its rows, and the numbers of those left out.
        self._rows: list[BranchRecord] = []
        self._left_out: Set[int] = frozenset()
        self._reason: str | None = None
        self._step = 0

    # -- branches come and go

    def open(self, record: BranchRecord) -> BranchRecord:
        """A branch has come. A record of the same rid in its request is forgotten."""
        self.requests.setdefault(record.request, {})[record.rid] = record
        self._request_of[record.rid] = record.request
        self._living.add(record)
        return record

    def close(
        self, record: BranchRecord, now_ms: float, finish: str, **figures: Any
    ) -> None:
        """It has ended; call once."""
        record.ended_ms, record.finish, record.figures = now_ms, finish, figures
        record.last_step = self._step
        self._living.discard(record)
        self._ended.append(record)
        self._num_ended_marks += len(record.marks)
        while (
            len(self._ended) > MAX_ENDED_RECORDS
            or self._num_ended_marks > MAX_ENDED_MARKS
        ):
            self._forget(self._ended.popleft())

    def _forget(self, record: BranchRecord) -> None:
        self._num_ended_marks -= len(record.marks)
        branches = self.requests.get(record.request, {})
        if branches.get(record.rid) is record:
            del branches[record.rid]
            if self._request_of.get(record.rid) == record.request:
                del self._request_of[record.rid]
        if not branches:
            self.requests.pop(record.request, None)

    def settle(self, now_ms: float) -> None:
        """Nothing runs or waits: who is still open left in an unusual way."""
        for record in list(self._living):
            self.close(record, now_ms, "unknown")

    # -- what is known

    def of(self, request: str) -> list[BranchRecord]:
        """The branches of a request by its name; maybe none."""
        return list(self.requests.get(request, {}).values())

    def living_requests(self) -> list[str]:
        """Ids of requests with a living branch, oldest first. Looks at all of these."""
        ids = {record.request for record in self._living}
        arrived = {
            id: next(iter(self.requests[id].values())).arrived_ms
            for id in ids
            if id in self.requests
        }
        return sorted(arrived, key=arrived.__getitem__)

    def find(self, id: str) -> list[BranchRecord]:
        """All branches of the request `id`, or the one branch of that rid; maybe none.

        A request's id goes first where both exist. Looks at all requests.
        """
        for branches in self.requests.values():
            if next(iter(branches.values())).shown_request == id:
                return list(branches.values())
        owner = self.requests.get(self._request_of.get(id, ""), {})
        return [owner[id]] if id in owner else []

    # -- steps

    def note_step(
        self,
        reqs: Sequence[Any],
        has_changed: bool,
        left_out: Set[int],
        mark: Mark,
        urgency: Callable[[], tuple[str, float] | None],
    ) -> None:
        """A step was planned for the rows `reqs`, without those in `left_out`.

        `has_changed`: a row has come or moved since the last step. `mark` is of the
        rows left out; who was urgent is asked only if some row's status changes.
        """
        self._step = mark.step
        if has_changed or len(reqs) != len(self._rows):
            self._note_rows([req.taper.record for req in reqs], mark)
        turned = left_out ^ self._left_out
        if left_out and mark.reason != self._reason:
            turned |= left_out
            self._reason = mark.reason
        self._left_out = left_out
        if not turned:
            return
        ran = Mark(mark.step, mark.now_ms, RUNNING)
        if left_out and (urgent := urgency()) is not None:
            name, slack_ms = urgent
            mark = msgspec.structs.replace(mark, urgent=name, urgent_slack_ms=slack_ms)
        for row in turned:
            self._rows[row].add(mark if row in left_out else ran)

    def _note_rows(self, rows: list[BranchRecord], mark: Mark) -> None:
        """Rows have come, gone or moved. Who went without an end was retracted."""
        before, here = set(self._rows), set(rows)
        deferred = {self._rows[row] for row in self._left_out}
        for record in before - here:
            if record.ended_ms is None:
                record.add(Mark(mark.step, mark.now_ms, AWAY))
        for record in here - before:
            if record.marks:
                record.add(Mark(mark.step, mark.now_ms, RUNNING))
        self._rows = rows
        self._left_out = {i for i, record in enumerate(rows) if record in deferred}
