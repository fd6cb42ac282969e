"""Builders for the policy tests: views by hand, views by hypothesis, a decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from sglang_taper.config import UTILITIES
from sglang_taper.policy.admission import AdmissionPolicy, make_policy, step_kv_tokens
from sglang_taper.policy.latency import predict_ms
from sglang_taper.policy.state import (
    BranchState,
    RequestState,
    StepBuilder,
    record_step,
)
from sglang_taper.policy.types import (
    AdmissionPlan,
    LatencyCoefficients,
    PolicyParams,
    RequestView,
    StepView,
)

POLICIES = ("off", "eager", "cap", "taper", "taper-paper", "ledger")
MODEL = LatencyCoefficients(10.0, 1.0, 0.0, trusted=True)


def make_request(**changes: Any) -> RequestView:
    """A request that got its first token at 10 ms and its last one at 100 ms."""
    facts = {
        "group": "g",
        "arrival_ms": 0.0,
        "first_token_ms": 10.0,
        "schedule_origin_ms": 10.0,
        "last_progress_ms": 100.0,
        "num_tokens": 5,
        "remaining_tokens": 100,
        "ttft_slo_ms": 1000.0,
        "tpot_slo_ms": 20.0,
    }
    return RequestView(**(facts | changes))


def make_view(
    widths: Sequence[int] = (1,),
    requests: list[RequestView] | None = None,
    **changes: Any,
) -> StepView:
    """A view with `widths[i]` branches of request i, all alike unless changed."""
    owner = [i for i, width in enumerate(widths) for _ in range(width)]
    count = len(owner)
    facts = {
        "step": 50,
        "now_ms": 105.0,
        "requests": requests or [make_request() for _ in widths],
        "request_of_row": owner,
        "branch": [b for width in widths for b in range(width)],
        "context_tokens": [100] * count,
        "shared_tokens": [0] * count,
        "output_tokens": [5] * count,
        "remaining_tokens": [50] * count,
        "last_run_step": [49] * count,
        "must_run": [],
        "params": PolicyParams(),
        "model": MODEL,
    }
    return StepView(**(facts | changes))


def plan(view: StepView, policy: str = "taper", **params: Any) -> AdmissionPlan:
    changed = msgspec.structs.replace(view.params, policy=policy, **params)
    return make_policy(policy).plan(msgspec.structs.replace(view, params=changed))


def params_strategy() -> st.SearchStrategy[PolicyParams]:
    return st.builds(
        PolicyParams,
        policy=st.sampled_from(POLICIES),
        cap=st.integers(1, 4),
        rho=st.sampled_from([None, 0.0, 0.5, 1.0]),
        deadline=st.sampled_from(["schedule", "progress"]),
        utility=st.sampled_from(UTILITIES),
    )


def model_strategy() -> st.SearchStrategy[LatencyCoefficients]:
    return st.builds(
        LatencyCoefficients,
        a_ms=st.sampled_from([0.0, 7.0, 40.0]),
        b_ms_per_row=st.sampled_from([0.0, 0.04, 3.0]),
        c_ms_per_token=st.sampled_from([0.0, 1.5e-5, 0.03]),
        shared_read_once=st.booleans(),
        graph_buckets=st.sampled_from([(), (1, 2, 4, 8), (8, 16, 24, 32)]),
        trusted=st.sampled_from([True, True, True, False]),
    )


@st.composite
def view_strategy(draw: st.DrawFn) -> StepView:
    """Any view an engine could show, late and early requests in the same batch."""
    widths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    count = sum(widths)
    request = st.builds(
        make_request,
        first_token_ms=st.sampled_from([None, 10.0, 1500.0]),
        schedule_origin_ms=st.floats(0, 100),
        last_progress_ms=st.floats(0, 105),
        num_tokens=st.integers(1, 12),
        remaining_tokens=st.integers(0, 40),
        tpot_slo_ms=st.sampled_from([5.0, 20.0, 60.0, 200.0]),
        priority=st.sampled_from([0.5, 1.0, 4.0]),
    )
    shared = draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
    own = draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
    column = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    return make_view(
        widths,
        [draw(request) for _ in widths],
        context_tokens=[s + o for s, o in zip(shared, own, strict=True)],
        shared_tokens=shared,
        output_tokens=draw(column),
        remaining_tokens=draw(column),
        last_run_step=[40 + age for age in draw(column)],
        must_run=sorted(draw(st.sets(st.integers(0, count - 1), max_size=2))),
        params=draw(params_strategy()),
        model=draw(model_strategy()),
        stall_share=draw(st.sampled_from([0.0, 0.2, 1.0])),
        num_waiting_prefill=draw(st.integers(0, 1)),
        mean_stall_ms=draw(st.sampled_from([0.0, 30.0, 900.0])),
        waiting_ttft_share=draw(st.sampled_from([0.0, 0.4, 1.5])),
    )


Stage = int | tuple[int, ...]


@dataclass(eq=False)
class Program:
    """A request as stages: an int is a serial stage of so many tokens, a tuple one
    parallel branch per entry. A fork or a join costs nothing."""

    state: RequestState
    stages: list[Stage]
    prompt_tokens: int
    live: list[BranchState] = field(default_factory=list)
    ended_ms: float | None = None

    def open_stages(self, now_ms: float) -> list[BranchState]:
        """The branches of the next stage that has any; marks the end after the last."""
        while self.stages and not self.live:
            stage = self.stages.pop(0)
            lengths = (stage,) if isinstance(stage, int) else stage
            self.live = [
                BranchState(self.state, index, self.prompt_tokens, length)
                for index, length in enumerate(lengths)
                if length > 0
            ]
        if not self.live:
            self.ended_ms = now_ms
        return self.live


class DecodeLoop:
    """Prefill first, then a decode step at a time, on a virtual clock.

    Prefill takes `5 + tokens` ms for all that waits and gives each its first token;
    a decode step takes exactly what `model` predicts. New rows go to the end of the
    batch, or with `by_request` behind the rows of earlier requests only.
    """

    def __init__(
        self,
        params: PolicyParams,
        model: LatencyCoefficients,
        programs: Sequence[Program],
        stall_share: float = 0.0,
        by_request: bool = False,
    ) -> None:
        self.params, self.model, self.stall_share = params, model, stall_share
        self.by_request = by_request
        self.position = {program.state: i for i, program in enumerate(programs)}
        self.policy: AdmissionPolicy = make_policy(params.policy)
        self.builder = StepBuilder()
        self.waiting = sorted(programs, key=lambda p: p.state.arrival_ms)
        self.program_of = {program.state: program for program in programs}
        self.states: list[BranchState] = []
        self.now_ms, self.step = 0.0, 0
        self.trace: list[str] = []

    def run(self) -> list[str]:
        while self.waiting or self.states:
            if not self.prefill():
                self.apply(*self.decide())
        return self.trace

    def prefill(self) -> bool:
        """Prefill all that has arrived, or wait for it if nothing runs."""
        if self.waiting and not self.states:
            self.now_ms = max(self.now_ms, self.waiting[0].state.arrival_ms)
        arrived = [p for p in self.waiting if p.state.arrival_ms <= self.now_ms]
        if not arrived:
            return False
        self.now_ms += 5 + sum(p.prompt_tokens for p in arrived)
        for program in arrived:
            self.waiting.remove(program)
            program.state.record_tokens(self.now_ms, 1, self.params.deadline)
            first = program.stages[0]
            assert isinstance(first, int)
            program.stages[0] = first - 1
            self._join(program)
        self.trace.append(f"P{self.now_ms:g}:{len(arrived)}")
        return True

    def decide(self) -> tuple[StepView, AdmissionPlan]:
        contexts = [state.shared_tokens + state.output_tokens for state in self.states]
        view = self.builder.build(
            self.states,
            contexts,
            [],
            now_ms=self.now_ms,
            step=self.step,
            params=self.params,
            model=self.model,
            stall_share=self.stall_share,
        )
        return view, self.policy.plan(view)

    def apply(self, view: StepView, plan: AdmissionPlan) -> None:
        tokens = step_kv_tokens(view, plan.rows)
        self.now_ms += predict_ms(self.model, len(plan.rows), tokens)
        record_step(self.states, plan.rows, self.step)
        ran = [self.states[row] for row in plan.rows]
        for state in ran:
            state.output_tokens += 1
        owners = [state.request for state in ran]
        for request in dict.fromkeys(owners):
            request.record_tokens(
                self.now_ms, owners.count(request), self.params.deadline
            )
        for state in ran:
            if state.output_tokens == state.max_new_tokens:
                self._finish(state)
        self.trace.append(f"D{self.now_ms:g}:{len(ran)}")
        self.step += 1

    def _finish(self, state: BranchState) -> None:
        state.end()
        self.states.remove(state)
        program = self.program_of[state.request]
        program.live.remove(state)
        if not program.live:
            self._join(program)

    def _join(self, program: Program) -> None:
        joined = program.open_stages(self.now_ms)
        for state in joined:
            state.last_run_step = self.step
        self.states.extend(joined)
        if self.by_request:
            self.states.sort(key=lambda state: self.position[state.request])
