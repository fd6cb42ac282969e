"""The engine around a policy: a queue, prefills first, then a decode step at a time.

Conventions: arrivals join before a step is chosen. Prefill stalls decode and gives
the first token. Forks and joins cost nothing but what the options say. The batch is
in order of requests, and within one in order of creation.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import msgspec

from sglang_taper.policy.admission import make_policy, step_kv_tokens
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.roster import DecodeRoster
from sglang_taper.policy.stalls import Stalls
from sglang_taper.policy.state import BranchState, StepBuilder, record_step
from sglang_taper.policy.types import AdmissionPlan, PolicyParams, StepView
from sglang_taper.sim.intake import EngineOptions, Entry, Intake
from sglang_taper.sim.machine import Machine
from sglang_taper.sim.predictors import Predictor, ScaledPredictor
from sglang_taper.sim.programs import News, Progress, Row, RunningRequest
from sglang_taper.workload.requests import PlannedRequest


class Planner(Protocol):
    def plan(self, step: StepView) -> AdmissionPlan: ...


class Totals(msgspec.Struct):
    """Sums over the steps of a run."""

    num_steps: int = 0
    num_prefills: int = 0
    num_deferring_steps: int = 0
    num_rows_admitted: int = 0
    num_rows_deferred: int = 0
    decode_ms: float = 0.0
    prefill_ms: float = 0.0


class Simulation:
    """One run. `run()` plays it to its end; then read the attributes.

    `steps`: (kind, end ms, number) of each, kind `P` (requests that got their first
    token) or `D` (rows). `itls_ms`: every gap between two tokens of a row.
    """

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        params: PolicyParams,
        machine: Machine,
        options: EngineOptions | None = None,
        *,
        concurrency: int | None = None,
        predictor: Predictor | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.machine, self.params = machine, params
        self.options = options or EngineOptions()
        self.planner = planner or make_policy(params.policy)
        self.predictor = predictor or ScaledPredictor(machine.decode)
        self.intake = Intake(requests, params, machine, self.options, concurrency)
        self.progress = Progress(self.options.joins, self.options.max_rows < math.inf)
        self.stalls, self.totals = Stalls(), Totals()
        self.now_ms = 0.0
        self.steps: list[tuple[str, float, int]] = []
        self.itls_ms = array("d")
        self._unseen = News()
        self._builder, self._roster = StepBuilder(), DecodeRoster()
        self._rows: list[Row] = []
        self._states: list[BranchState] = []
        self._base_tokens: list[int] = []
        self._owners: list[RunningRequest] = []

    def run(self) -> Simulation:
        intake = self.intake
        while True:
            intake.arrive(self.now_ms)
            if self.progress.dirty:
                self._lay_out()
            intake.admit(len(self._rows))
            if intake.ready:
                self._start_ready()
            elif intake.may_prefill(self.now_ms, is_decoding=bool(self._rows)):
                self._prefill()
            elif self._rows:
                self._decode()
            elif self._unseen:
                self._settle()
            elif intake.next_arrival_ms is not None:
                self.now_ms = max(self.now_ms, intake.next_arrival_ms)
            else:
                return self

    # -- prefill

    def _prefill(self) -> None:
        num_tokens, done = self.intake.take_chunk()
        duration_ms = self.machine.prefill.duration_ms(num_tokens)
        self._spend(duration_ms, is_stall=True)
        self.steps.append(("P", self.now_ms, len(done)))
        for entry in done:
            self._prefilled(entry)
        self._settle()

    def _start_ready(self) -> None:
        """Forks and joins that waited for rows only."""
        ready, self.intake.ready = self.intake.ready, []
        for entry in ready:
            self._prefilled(entry)
        self._settle()

    def _prefilled(self, entry: Entry) -> None:
        path, now_ms = entry.path, self.now_ms
        if path is None:
            self.progress.start(entry.request, now_ms)
        elif path.to_open:
            self.progress.open_branches(path, now_ms)
        else:
            gives_token = entry.num_tokens > 0 and path.next_is_serial
            if gives_token:
                path.request.state.record_tokens(now_ms, 1, self.params.deadline)
            self.progress.proceed(path, now_ms, has_token=gives_token)

    def _settle(self) -> None:
        """What a step has brought is known at its end, or at that of the next one."""
        news = self.progress.take_news()
        if self.options.late_results:
            news, self._unseen = self._unseen, news
        self._act_on(news)

    def _act_on(self, news: News) -> None:
        """Requests have ended, and paths wait to go on."""
        for request in news.ended:
            self.intake.retire(request)
            request.is_victim = self.progress.was_victim(request)
        for path, num_tokens, num_rows in news.waiting:
            self.intake.go_on(
                Entry(path.request, num_tokens, self.now_ms, path, num_rows)
            )

    def _spend(self, duration_ms: float, is_stall: bool) -> None:
        self.now_ms += duration_ms
        self.stalls.record(duration_ms, is_stall)
        if is_stall:
            self.totals.num_prefills += 1
            self.totals.prefill_ms += duration_ms
        else:
            self.totals.num_steps += 1
            self.totals.decode_ms += duration_ms

    # -- decode

    def _lay_out(self) -> None:
        self._owners = [request for request in self.intake.resident if request.rows]
        self._rows = [row for request in self._owners for row in request.rows]
        self._states = [row.state for row in self._rows]
        self._base_tokens = [row.base_tokens for row in self._rows]
        self._roster.sync(self._states, self.now_ms)
        self.progress.dirty = False

    def _decode(self) -> None:
        view = self._observe()
        plan = self.planner.plan(view)
        kv_tokens = step_kv_tokens(view, plan.rows)
        duration_ms = self._duration_ms(view, plan.rows, kv_tokens)
        self._spend(duration_ms, is_stall=False)
        self.predictor.observe(len(plan.rows), kv_tokens, duration_ms)
        self._apply(view, plan.rows)
        self.steps.append(("D", self.now_ms, len(plan.rows)))

    def _observe(self) -> StepView:
        outputs = map(attrgetter("output_tokens"), self._states)
        contexts = [b + n for b, n in zip(self._base_tokens, outputs, strict=True)]
        return self._builder.build(
            self._states,
            contexts,
            [],
            now_ms=self.now_ms,
            step=self.totals.num_steps,
            params=self.params,
            model=self.predictor.coefficients(),
            num_waiting_prefill=len(self.intake.waiting),
            stall_share=self.stalls.share if self.options.sees_stalls else 0.0,
            mean_stall_ms=self.stalls.mean_ms if self.options.sees_stalls else 0.0,
            waiting_ttft_share=self.intake.waiting_ttft_share(self.now_ms),
        )

    def _duration_ms(self, view: StepView, rows: list[int], kv_tokens: int) -> float:
        duration_ms = predict_ms(self.machine.decode, len(rows), kv_tokens)
        if self.machine.group_ms and self.machine.decode.shared_read_once:
            widths = Counter(view.request_of_row[row] for row in rows)
            groups = sum(width > 1 for width in widths.values())
            duration_ms += self.machine.group_ms * groups
        return duration_ms

    def _apply(self, view: StepView, rows: list[int]) -> None:
        step = self.progress.step = view.step
        record_step(self._states, rows, step)
        deferred = view.num_rows - len(rows)
        self.totals.num_rows_admitted += len(rows)
        self.totals.num_rows_deferred += deferred
        self.totals.num_deferring_steps += deferred > 0
        # Before rows go, and with them the layout.
        given = Counter(map(view.request_of_row.__getitem__, rows))
        for index, count in given.items():
            owner = self._owners[index].state
            owner.record_tokens(self.now_ms, count, self.params.deadline)
        for row in self._give_tokens([self._rows[i] for i in rows]):
            self.progress.finish_row(row, self.now_ms)
        self._settle()

    def _give_tokens(self, rows: list[Row]) -> list[Row]:
        """Each row gets a token; the rows that have all of theirs."""
        now_ms, finished = self.now_ms, []
        for row in rows:
            state = row.state
            state.output_tokens += 1
            gap_ms = now_ms - row.last_ms
            row.last_ms = now_ms
            self.itls_ms.append(gap_ms)
            if gap_ms > row.path.request.max_itl_ms:
                row.path.request.max_itl_ms = gap_ms
            if state.output_tokens == state.max_new_tokens:
                finished.append(row)
        return finished
