"""What the controller writes down: a record per branch, and who met its SLOs."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_taper.engine.attainment import Attainment
from sglang_taper.engine.counters import Counters
from sglang_taper.engine.groups import Branch
from sglang_taper.engine.headers import id_in
from sglang_taper.engine.records import DEFERRED, Mark, RecordBook
from sglang_taper.engine.tracing import trace_branch
from sglang_taper.policy.slack import most_urgent
from sglang_taper.policy.types import AdmissionPlan, StepView
from sglang_taper.probe import PROBE_RID

ABORT = "abort"
# Request ids that begin so are the server's own.
NOBODYS = (PROBE_RID, HEALTH_CHECK_RID_PREFIX)


class Recorder:
    """One per scheduler. Reads what others decide, and decides nothing."""

    def __init__(self, counters: Counters, ttl_ms: float) -> None:
        self.book = RecordBook()
        self.attainment = Attainment(counters, ttl_ms)

    def came(self, branch: Branch) -> None:
        self.book.open(branch.record)
        if not branch.is_prefix_only:
            self.attainment.resumed(branch.state.request)

    def got_first(self, branch: Branch, req: Any, now_ms: float) -> None:
        """The prefill of `branch` is over, or it starts as a decode row."""
        record = branch.record
        record.first_token_ms = now_ms
        entered_s = getattr(req.time_stats, "forward_entry_time", 0.0)
        # SGLang's stamp is on the leader's step clock, which a tick may be behind.
        record.admitted_ms = min(now_ms, 1000 * entered_s) if entered_s else now_ms

    def ended(self, branch: Branch, req: Any, now_ms: float) -> None:
        reason = req.finished_reason
        self.book.close(
            branch.record,
            now_ms,
            ABORT if reason is None else str(reason.to_json()["type"]),
            prefix_tokens_shared=branch.num_shared,
            tokens_prefilled=branch.num_prefilled,
            tokens_recomputed=branch.num_recomputed,
            row_aliased=branch.is_aliased,
            prefill_held_ms=branch.prefill_held_ms,
        )
        trace_branch(req.time_stats, branch.record, now_ms)
        group = branch.group
        if branch.is_prefix_only or branch.record.rid.startswith(NOBODYS):
            return
        if group is None or group.num_live == 0:
            may_go_on = group is not None
            self.attainment.ended(branch.state.request, now_ms, may_go_on)

    def settle(self, now_ms: float) -> None:
        self.book.settle(now_ms)
        self.attainment.settle(now_ms)

    def planned(
        self,
        reqs: Sequence[Any],
        has_changed: bool,
        left_out: Set[int],
        view: StepView,
        plan: AdmissionPlan,
    ) -> None:
        """A step of the rows `reqs` was planned; `left_out` of them are deferred."""
        mark = Mark(view.step, view.now_ms, DEFERRED, plan.reason, plan.budget_ms)
        urgency = partial(self._urgency, view, plan)
        self.book.note_step(reqs, has_changed, left_out, mark, urgency)

    def _urgency(self, view: StepView, plan: AdmissionPlan) -> tuple[str, float] | None:
        """Only a budget comes from somebody's slack."""
        if plan.budget_ms is None:
            return None
        request, slack_ms = most_urgent(view)
        records = self.book.of(request.group)
        shown = records[0].shown_request if records else id_in(request.group)
        return shown, slack_ms
