"""One simulated run, and what a result says about it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.policy.admission import make_policy
from sglang_taper.policy.types import PolicyParams
from sglang_taper.sim.ablations import KeepWidths
from sglang_taper.sim.intake import EngineOptions
from sglang_taper.sim.loop import Simulation
from sglang_taper.sim.machine import Machine
from sglang_taper.sim.predictors import (
    ConstantPredictor,
    Predictor,
    ScaledPredictor,
    learned_predictor,
)
from sglang_taper.workload.requests import PlannedRequest
from sglang_taper.workload.score import (
    Outcome,
    counted_window,
    mean_time_between_tokens_ms,
    percentile,
    score,
)

PREDICTORS = ("exact", "constant", "learned")


class Handicap(msgspec.Struct, frozen=True):
    """What is taken away from the policy: how well it predicts, and replanning.

    `bias` and `noise` are relative errors of an `exact` predictor, systematic and per
    step. Without `replans` widths are chosen when a branch comes or goes, and kept.
    """

    predictor: str = "exact"
    bias: float = 0.0
    noise: float = 0.0
    replans: bool = True

    def __post_init__(self) -> None:
        if self.predictor not in PREDICTORS:
            accepted = "one of " + ", ".join(PREDICTORS)
            raise FieldError("--predictor", self.predictor, accepted)
        if not -0.9 <= self.bias <= 10:
            raise FieldError("--predictor-bias", self.bias, "-0.9 to 10")
        if not 0 <= self.noise <= 10:
            raise FieldError("--predictor-noise", self.noise, "0 to 10")

    def make_predictor(self, machine: Machine, seed: int) -> Predictor:
        if self.predictor == "constant":
            return ConstantPredictor(machine.decode)
        if self.predictor == "learned":
            return learned_predictor(machine.decode)
        rng = random.Random(f"noise {seed}")
        return ScaledPredictor(machine.decode, self.bias, self.noise, rng)


def simulate(
    requests: Sequence[PlannedRequest],
    params: PolicyParams,
    machine: Machine,
    options: EngineOptions,
    handicap: Handicap,
    concurrency: int | None,
    seed: int = 0,
) -> Simulation:
    """Play `requests` to the end."""
    policy = make_policy(params.policy)
    return Simulation(
        requests,
        params,
        machine,
        options,
        concurrency=concurrency,
        predictor=handicap.make_predictor(machine, seed),
        planner=policy if handicap.replans else KeepWidths(policy),
    ).run()


def outcomes_of(simulation: Simulation) -> list[Outcome]:
    """Of all requests, in the order in which they were sent."""
    return [request.outcome() for request in simulation.intake.sent]


def counted(simulation: Simulation) -> tuple[list[Outcome], float]:
    """The outcomes that count (`counted_window`), and the seconds they stand for."""
    sent, is_closed = simulation.intake.sent, simulation.intake.is_closed
    begin_ms, end_ms = counted_window(
        sent[0].arrival_ms, sent[-1].arrival_ms, simulation.now_ms, is_closed
    )
    outcomes = outcomes_of(simulation)
    if is_closed:
        outcomes = [
            o for o in outcomes if o.ended_ms and begin_ms < o.ended_ms <= end_ms
        ]
    return outcomes, (end_ms - begin_ms) / 1000


def result_of(simulation: Simulation, slos_ms: Mapping[str, float]) -> dict[str, Any]:
    """SGLang's keys, ours (`workload/score.py`), and those of the engine's steps."""
    outcomes, duration_s = counted(simulation)
    return {**score(outcomes, slos_ms, duration_s), **_step_facts(simulation)}


def _step_facts(simulation: Simulation) -> dict[str, Any]:
    totals = simulation.totals
    steps = max(1, totals.num_steps)
    busy_ms = totals.decode_ms + totals.prefill_ms
    itls_ms = sorted(simulation.itls_ms)
    return {
        "num_steps": totals.num_steps,
        "num_deferring_steps": totals.num_deferring_steps,
        "mean_rows_admitted": totals.num_rows_admitted / steps,
        "mean_rows_deferred": totals.num_rows_deferred / steps,
        "mean_step_ms": totals.decode_ms / steps,
        "stall_share": totals.prefill_ms / busy_ms if busy_ms else 0.0,
        "mean_time_between_tokens_ms": mean_time_between_tokens_ms(
            outcomes_of(simulation)
        ),
        "p99_itl_ms": percentile(itls_ms, 99),
        "max_itl_ms": percentile(itls_ms, 100),
        "simulated_s": simulation.now_ms / 1000,
    }
