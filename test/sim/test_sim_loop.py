"""The engine around the policy: places, chunks, joins, holds, and what is conserved."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_factories import MACHINE, STEP, planned_strategy, requests, run, steps_of

from sglang_taper.policy.admission import policy_names
from sglang_taper.policy.baselines import EagerPolicy, OffPolicy
from sglang_taper.policy.types import AdmissionPlan, PolicyParams, StepView
from sglang_taper.sim.ablations import KeepWidths
from sglang_taper.sim.intake import JOINS, EngineOptions
from sglang_taper.sim.loop import Simulation
from sglang_taper.sim.machine import Machine, Prefill
from sglang_taper.workload.requests import PlannedRequest

FLAT = Machine(msgspec.structs.replace(STEP, c_ms_per_token=0.0), Prefill(5.0, 1.0))
FORK = requests((0, 4, [2, [[3], [5], [4]], 2]))


@given(
    st.lists(planned_strategy(), min_size=1, max_size=5),
    st.sampled_from(policy_names()),
    st.sampled_from(JOINS),
    st.sampled_from([math.inf, 2]),
    st.sampled_from([math.inf, 5]),
    st.sampled_from(["off", "0.05", "auto"]),
    st.sampled_from([None, 2]),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_every_token_is_produced_once_and_places_are_kept(
    planned: list[PlannedRequest],
    policy: str,
    joins: str,
    max_requests: float,
    max_rows: float,
    hold: str,
    concurrency: int | None,
    late_results: bool,
) -> None:
    planned = sorted(planned, key=lambda request: request.arrival_ms)
    simulation = run(
        planned,
        policy,
        joins=joins,
        max_requests=max_requests,
        max_rows=max_rows,
        prefill_hold_s=hold,
        concurrency=concurrency,
        late_results=late_results,
    )
    sent = simulation.intake.sent
    assert [request.planned for request in sent] == planned
    for request in sent:
        shape = request.planned.shape
        assert request.state.num_tokens == shape.num_tokens
        assert request.ended_ms is not None
        assert request.arrival_ms < request.state.first_token_ms <= request.ended_ms
    assert simulation.now_ms == max(at for _, at, _ in simulation.steps)
    produced = sum(shape.num_tokens for shape in (r.planned.shape for r in sent))
    by_prefill = produced - simulation.totals.num_rows_admitted
    assert len(sent) <= by_prefill
    assert joins != "kv" or by_prefill == len(sent)
    assert not simulation.intake.resident
    assert simulation.intake._kv_tokens == 0


@given(st.lists(planned_strategy(), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_nothing_deferred_means_the_critical_path_is_run_step_by_step(
    planned: list[PlannedRequest],
) -> None:
    first = [msgspec.structs.replace(planned[0], arrival_ms=0.0)]
    simulation = run(first, "eager")
    assert simulation.totals.num_steps == first[0].shape.num_critical_tokens - 1
    off = run(first, "off")
    assert off.totals.num_steps == first[0].shape.num_tokens - 1


def widest(simulation: Simulation) -> int:
    return max(number for kind, _, number in simulation.steps if kind == "D")


def test_a_fork_waits_until_all_its_branches_have_a_place() -> None:
    two = [*FORK, *requests((0, 4, [20]))]
    assert widest(run(two, machine=FLAT, max_rows=4)) == 4
    narrow = run(two, machine=FLAT, max_rows=3)
    assert widest(narrow) == 3
    forked, serial = narrow.intake.sent
    assert forked.ended_ms > serial.ended_ms


def test_a_fork_wider_than_all_places_runs_when_nothing_else_does() -> None:
    assert widest(run(FORK, machine=FLAT, max_rows=2)) == 3


@pytest.mark.parametrize(("joins", "tokens"), [("kv", 0), ("tree", 9), ("text", 12)])
def test_a_join_computes_again_what_it_does_not_find(joins: str, tokens: int) -> None:
    simulation = run(FORK, machine=FLAT, joins=joins)
    assert simulation.totals.num_prefills == 1 + bool(tokens)
    again_ms = 5.0 + tokens if tokens else 0.0
    assert simulation.totals.prefill_ms == 5.0 + 4 + again_ms
    assert simulation.totals.num_rows_admitted == 15 - bool(tokens)


def test_prefills_are_held_and_go_together() -> None:
    three = requests((0, 4, [9]), (12, 4, [3]), (30, 4, [3]))
    assert steps_of(run(three, machine=FLAT)).split().count("P29:1") == 1
    held = steps_of(run(three, machine=FLAT, prefill_hold_s="0.05"))
    assert held.startswith("P9:1 D20:1 D31:1 D42:1 D53:1 D64:1 P77:2")


def test_a_held_prefill_goes_at_once_when_nothing_decodes() -> None:
    two = requests((0, 4, [2]), (10, 4, [2]))
    held = steps_of(run(two, machine=FLAT, prefill_hold_s="10"))
    assert held == "P9:1 D20:1 P29:1 D40:1"


class Spy:
    """Runs everything, and keeps what it was told about stalls."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def plan(self, step: StepView) -> AdmissionPlan:
        self.seen.append((step.stall_share, step.mean_stall_ms))
        return EagerPolicy().plan(step)


@pytest.mark.parametrize("sees_stalls", [True, False])
def test_a_policy_sees_stalls_unless_they_are_hidden(sees_stalls: bool) -> None:
    spy, options = Spy(), EngineOptions(sees_stalls=sees_stalls)
    Simulation(FORK, PolicyParams(), MACHINE, options, planner=spy).run()
    seen = [(share > 0, mean_ms > 0) for share, mean_ms in spy.seen]
    assert set(seen) == {(sees_stalls, sees_stalls)}


class WideFirst:
    """Everything in the first step it is asked about, then S0."""

    def __init__(self) -> None:
        self.asked = 0

    def plan(self, step: StepView) -> AdmissionPlan:
        self.asked += 1
        wide = step.num_rows > 1 and step.output_tokens[0] == 0
        return EagerPolicy().plan(step) if wide else OffPolicy().plan(step)


def test_without_replanning_widths_stand_until_a_branch_comes_or_goes() -> None:
    planned = requests((0, 4, [2, [[9], [9], [9]], 2]))
    replanned, kept = WideFirst(), WideFirst()
    with_it = Simulation(planned, PolicyParams(), FLAT, planner=replanned).run()
    without = Simulation(planned, PolicyParams(), FLAT, planner=KeepWidths(kept)).run()
    assert [n for kind, _, n in without.steps if kind == "D"] == [1] + [3] * 9 + [1] * 2
    assert with_it.totals.num_steps > without.totals.num_steps
    # Asked when the batch changed: at first, at the fork, at the join.
    assert kept.asked == 3


def test_a_closed_loop_sends_the_next_request_when_one_has_ended() -> None:
    four = requests(*[(0, 4, [3])] * 4)
    simulation = run(four, machine=FLAT, concurrency=2)
    arrivals = [request.arrival_ms for request in simulation.intake.sent]
    assert arrivals == [0.0, 0.0, 37.0, 37.0]


def test_the_same_run_gives_the_same_steps() -> None:
    many = requests(*[(7.0 * i, 10 + i, [3, [[4], [6], [2 + i]], 2]) for i in range(9)])
    assert steps_of(run(many, "ledger")) == steps_of(run(many, "ledger"))


# One forks and joins, the other has eight tokens all the while.
BESIDE = requests((0, 4, [2, [[2], [2]], 1]), (0, 4, [8]))
AT_ONCE = "P13:2 D25:2 D38:3 D51:3 D63:2 D74:1 D85:1 D96:1"
A_STEP_LATER = "P13:2 D25:2 D36:1 D49:3 D62:3 D73:1 D85:2 D96:1"


@pytest.mark.parametrize(("late", "steps"), [(False, AT_ONCE), (True, A_STEP_LATER)])
def test_with_late_results_forks_and_joins_miss_a_step(late: bool, steps: str) -> None:
    simulation = run(BESIDE, machine=FLAT, max_rows=9, late_results=late)
    assert steps_of(simulation) == steps


def test_with_late_results_nothing_waits_when_nothing_else_runs() -> None:
    early, late = (
        steps_of(run(FORK, machine=FLAT, max_rows=9, late_results=late))
        for late in (False, True)
    )
    assert early == late


def test_with_late_results_a_client_sends_its_next_request_a_step_later() -> None:
    planned = requests((0, 4, [2]), (0, 4, [6]), (0, 4, [2]))
    early, late = (
        run(planned, machine=FLAT, max_rows=9, late_results=late, concurrency=2)
        for late in (False, True)
    )
    assert early.intake.sent[2].arrival_ms == 25
    assert late.intake.sent[2].arrival_ms == 36
