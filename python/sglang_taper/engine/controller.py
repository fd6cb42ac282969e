"""What the scheduler asks: who runs, what happened, what is known.

One `BranchController` per scheduler process. It owns the clock, the groups, the
latency model and the policy, and holds no tensor; `TaperScheduler` tells it what
happened and applies what it decides.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_taper.changes import updated_params
from sglang_taper.config import TaperConfig
from sglang_taper.engine.clock import StepClock, TaperTick, monotonic_ms
from sglang_taper.engine.counters import Counters, StepRecord
from sglang_taper.engine.groups import Branch, GroupTable
from sglang_taper.engine.observe import (
    every_row_must_run,
    not_read_once,
    observe_batch,
)
from sglang_taper.engine.pins import PinTable, branch_ended, branch_started
from sglang_taper.engine.prefix import namespace_of
from sglang_taper.engine.recorder import Recorder
from sglang_taper.engine.sharing import note_finish, note_prefill
from sglang_taper.engine.siblings import Fork
from sglang_taper.engine.timing import LaunchedStep, MeasuredStep, StepTimer
from sglang_taper.policy.admission import make_policy, step_kv_tokens
from sglang_taper.policy.family import subtree
from sglang_taper.policy.latency import StepLatencyModel, predict_ms
from sglang_taper.policy.roster import DecodeRoster
from sglang_taper.policy.state import StepBuilder, record_step
from sglang_taper.policy.types import AdmissionPlan, StepView
from sglang_taper.protocol import BranchMeta

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class BranchController:
    """Decides which rows run and remembers what they did."""

    def __init__(
        self,
        config: TaperConfig,
        model: StepLatencyModel,
        num_ranks: int,
        asynchronous: bool,
        pins: PinTable,
        page_size: int,
    ) -> None:
        self.params = config.policy_params
        self.policy = make_policy(self.params.policy)
        self.model = model
        self.clock = StepClock(num_ranks)
        self.groups = GroupTable(config.fork_pin_ttl_s)
        self.pins = pins
        self._page_size = page_size
        self.timer = StepTimer(asynchronous)
        self.counters = Counters()
        self.recorder = Recorder(self.counters, self.groups.ttl_ms)
        self.step = 0
        self._builder = StepBuilder()
        self._roster = DecodeRoster()
        self._in_flight: deque[LaunchedStep] = deque()
        self._planned: StepRecord | None = None
        self._is_settled = True
        # Forks of which enough branches have finished: the others are to be cancelled.
        self.decided: list[Fork] = []

    # -- requests come and go

    def attach(
        self, rid: str, meta: BranchMeta, arrival_ms: float, max_new_tokens: int
    ) -> Branch:
        """The branch of a new request, to be kept as `req.taper`."""
        self._is_settled = False
        branch = self.groups.attach(rid, meta, self.params, arrival_ms, max_new_tokens)
        self.recorder.came(branch)
        is_counted = branch.group is not None and not branch.is_prefix_only
        self.counters.num_branches += is_counted
        return branch

    def end(self, req: Any) -> None:
        """`req` is finished, or was aborted before it ran. Idempotent."""
        branch: Branch | None = getattr(req, "taper", None)
        if branch is None or branch.ended:
            return
        now_ms = self.clock.now_ms
        self._roster.remove(branch.state, now_ms)
        aborted = is_aborted(req)
        if not aborted:
            where = (self._page_size, namespace_of(req))
            note_finish(branch, req.origin_input_ids, req.output_ids, *where)
            if branch.fork is not None and branch.fork.finish_one():
                self.decided.append(branch.fork)
        self.groups.end(branch, now_ms)
        self.recorder.ended(branch, req, now_ms)
        # A request goes on when the server has cancelled branches of it.
        ended_it = aborted and branch.cancelled_by is None
        branch_ended(self.pins, branch, req, ended_it, now_ms)

    def abort_group(
        self, name: str, now_ms: float, parent: str | None = None
    ) -> set[str] | None:
        """A group is about to be aborted, or what descends from `parent` in it.

        Returns the request ids meant, None for all; nothing is pinned for them.
        """
        if parent is not None:
            group = self.groups.groups.get(name)
            if group is None:
                return {parent}
            members = subtree(parent, group.parents)
            self.pins.unpin_requests(group, members)
            return members
        if (group := self.groups.abort(name, now_ms)) is not None:
            self.pins.unpin_group(group)
        return None

    def expire_pins(self) -> bool:
        """Give up what no request has used for longer than the TTL. True: some."""
        if not len(self.pins):
            return False
        return self.pins.expire(self.clock.now_ms, self.groups.ttl_ms)

    def flushed(self) -> None:
        """The cache is empty: what was shared or pinned is gone."""
        self.groups.clear()
        self.pins.forget()

    def settle(self) -> None:
        """The engine is fully idle. Called in a tight loop."""
        if not self._is_settled:
            self._is_settled = True
            self.groups.settle(self.clock.now_ms)
            self.recorder.settle(self.clock.now_ms)

    # -- one decode step

    def plan(
        self,
        batch: ScheduleBatch,
        queue: Sequence[Any],
        each_reads: Callable[[list[int]], bool] = lambda rows: False,
    ) -> AdmissionPlan:
        """Decide which rows of `batch` run in the step that is about to start.

        `queue` is what waits for prefill. `each_reads` says whether in a step of
        certain rows each would read the prefix that they share. A plan that took it to
        be read once is then made again.
        """
        began = time.perf_counter()
        self.step += 1
        tick = self._tick_in_force()
        states = [req.taper.state for req in batch.reqs]
        has_changed = self._roster.sync(states, tick.now_ms)
        view = observe_batch(
            self._builder, batch, states, self.step, tick, self.params, queue
        )
        plan = self._decide(view, batch)
        if view.model.shared_read_once and each_reads(plan.rows):
            view = not_read_once(view)
            plan = self._decide(view, batch)
        left_out = record_step(states, plan.rows, self.step)
        self._planned = self._record(view, plan)
        self.recorder.planned(batch.reqs, has_changed, left_out, view, plan)
        self.counters.planned(self._planned, 1000 * (time.perf_counter() - began))
        return plan

    def _decide(self, view: StepView, batch: ScheduleBatch) -> AdmissionPlan:
        if every_row_must_run(batch):
            return AdmissionPlan(rows=list(range(view.num_rows)), reason="forced")
        return self.policy.plan(view)

    def _record(self, view: StepView, plan: AdmissionPlan) -> StepRecord:
        kv_tokens = step_kv_tokens(view, plan.rows)
        predicted_ms = plan.predicted_ms
        if predicted_ms is None and view.model.trusted:
            predicted_ms = predict_ms(view.model, len(plan.rows), kv_tokens)
        return StepRecord(
            step=view.step,
            now_ms=view.now_ms,
            policy=self.params.policy,
            num_requests=len(view.requests),
            num_rows=view.num_rows,
            num_admitted=len(plan.rows),
            kv_tokens=kv_tokens,
            reason=plan.reason,
            predicted_ms=predicted_ms,
            baseline_ms=plan.baseline_ms,
            budget_ms=plan.budget_ms,
            min_slack_ms=plan.min_slack_ms,
        )

    def launched(self, num_prefill_tokens: int | None, after_idle: bool) -> None:
        """A batch is about to be launched: a prefill of so many new tokens, or (None)
        a decode batch, which was planned just before."""
        record = prefill = None
        if num_prefill_tokens is None:
            record = self._planned
        else:
            prefill = self.counters.prefilled(self.step, num_prefill_tokens)
        self._planned = None
        step = LaunchedStep(
            launched_ms=monotonic_ms(),
            num_rows=record.num_admitted if record else 0,
            kv_tokens=record.kv_tokens if record else 0,
            record=record,
            prefill=prefill,
        )
        self._in_flight.append(step)
        self._learn(self.timer.launched(step, after_idle))
        if prefill is None and self.params.test_step_cost_ms:
            # After the step's time has begun: it is to look like the step's own.
            time.sleep(self.params.test_step_cost_ms / 1000)

    def result_ready(self) -> None:
        """The results of the oldest launched batch have arrived on the host."""
        if self._in_flight:
            step = self._in_flight.popleft()
            self._learn(self.timer.result_ready(step, monotonic_ms()))

    def _learn(self, measured: MeasuredStep | None) -> None:
        if measured is None:
            return
        self.model.observe(measured.num_rows, measured.kv_tokens, measured.step_ms)
        if measured.record is not None:
            self.counters.measured(measured.record, measured.step_ms)

    def committed(self, reqs: Sequence[Any]) -> None:
        """Results were processed: count new tokens, end finished branches."""
        now_ms = self.clock.now_ms
        new_tokens: dict[Any, int] = {}
        for req in reqs:
            branch: Branch | None = getattr(req, "taper", None)
            if branch is None:
                continue
            self._note_first_result(branch, req)
            count = len(req.output_ids) - branch.state.output_tokens
            if count > 0 and not branch.is_prefix_only:
                branch.state.output_tokens += count
                owner = branch.state.request
                new_tokens[owner] = new_tokens.get(owner, 0) + count
        for owner, count in new_tokens.items():
            owner.record_tokens(now_ms, count, self.params.deadline)
        for req in reqs:
            if req.finished():
                self.end(req)

    def _note_first_result(self, branch: Branch, req: Any) -> None:
        # Chunks of a prefill have results without a token.
        if branch.prefilled or not (req.output_ids or req.finished()):
            return
        branch.state.last_run_step = self.step
        where = (self._page_size, namespace_of(req))
        note_prefill(branch, req.origin_input_ids, req.cached_tokens, *where)
        if branch.group is not None:
            pinned = [pin.num_tokens for _, pin in self.pins.of(branch.group)]
            branch.num_pinned = min(req.cached_tokens, max(pinned, default=0))
        self.recorder.got_first(branch, req, self.clock.now_ms)
        branch_started(self.pins, branch, req, self.clock.now_ms)
        counters = self.counters
        counters.num_prefix_shared_tokens += branch.num_shared
        counters.num_recomputed_tokens += branch.num_recomputed
        counters.num_evicted_tokens += branch.num_evicted
        counters.num_prefilled_tokens += branch.num_prefilled

    # -- time and measurements all ranks agree on

    def make_tick(self) -> TaperTick:
        """What the leader tells all ranks."""
        stalls = self.timer.stalls
        return TaperTick(
            monotonic_ms(), self.model.coefficients(), stalls.share, stalls.mean_ms
        )

    def _tick_in_force(self) -> TaperTick:
        return self.clock.tick if self.clock.shared else self.make_tick()

    # -- control

    def change_policy(self, changes: dict[str, Any]) -> None:
        """Put other parameters in force from the next step on.

        Raises FieldError and changes nothing when one is not acceptable.
        """
        params = updated_params(self.params, changes)
        self.policy = make_policy(params.policy)
        self.params = params


def is_aborted(req: Any) -> bool:
    """Whether `req` ends without a result of its own: what it has is not kept."""
    reason = req.finished_reason
    return reason is None or reason.to_json()["type"] == "abort"
