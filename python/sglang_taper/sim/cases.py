"""Small workloads whose outcome another implementation worked out to the last digit.

They pin down what is easy to get wrong: when arrivals join, what a step reads, who
runs first among equals, how a prompt is cut into chunks. Prefills are not announced to
the policy (`sees_stalls` False), and `taper` is the published rule (`taper-paper`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_taper.changes import parse_policy, updated_params
from sglang_taper.policy.types import LatencyCoefficients, PolicyParams
from sglang_taper.sim.intake import EngineOptions
from sglang_taper.sim.loop import Simulation
from sglang_taper.sim.machine import Machine, Prefill
from sglang_taper.workload.requests import PlannedRequest
from sglang_taper.workload.score import score
from sglang_taper.workload.shape import make_shape

BASELINES = ("off", "eager", "cap:cap=2")


class Case(msgspec.Struct, frozen=True):
    """A workload, a machine, SLOs, and the policies to run."""

    name: str
    requests: list[PlannedRequest]
    machine: Machine
    policies: tuple[str, ...]
    ttft_slo_ms: float = 1e9
    tpot_slo_ms: float = 1e9
    max_requests: float = 1e9


def _requests(*rows: tuple[float, int, list[Any]]) -> list[PlannedRequest]:
    return [PlannedRequest(at, make_shape(prompt, path)) for at, prompt, path in rows]


def _machine(a: float, b: float, c: float, prefill: float, **more: Any) -> Machine:
    shared = more.pop("shared_read_once", False)
    decode = LatencyCoefficients(a, b, c, shared_read_once=shared, trusted=True)
    return Machine(decode, Prefill(prefill, 1.0), **more)


def _five() -> Case:
    return Case(
        "five",
        _requests(
            (0, 4, [6]),
            (0, 4, [2, [[3], [5]], 2]),
            (0, 4, [3]),
            (12, 4, [1, [[2], [2], [2]], 1]),
            (40, 4, [4]),
        ),
        _machine(10, 1, 0, 5),
        (
            *BASELINES,
            "taper-paper:rho=1:deadline=progress",
            "taper-paper:rho=0.5:deadline=progress",
            "taper-paper:rho=1:deadline=schedule",
        ),
        30,
        18,
    )


def _medium() -> Case:
    rows: list[tuple[float, int, list[Any]]] = []
    for i in range(200):
        path: list[Any] = [20 + 13 * i % 40]
        if i % 2:
            fork = [[10 + (11 * i + 17 * j) % 20] for j in range(2 + i % 9)]
            path = [5 + i % 7, fork, 3 + i % 5]
        rows.append((650 * i, 20 + 37 * i % 60, path))
    return Case(
        "medium",
        _requests(*rows),
        _machine(100, 4, 0, 30, chunk_tokens=256),
        (
            *BASELINES,
            "taper-paper:rho=0.5:deadline=progress",
            "taper-paper:rho=0.5:deadline=schedule",
        ),
        3000,
        210,
        24,
    )


def _small_cases() -> list[Case]:
    """One convention each."""
    two = [(0.0, 10, [3]), (0.0, 10, [2])]
    late = [(0.0, 10, [3]), (1.0, 10, [2])]
    context = _requests((0, 20, [2, [[2], [3]], 1]))
    nested = _requests((0, 5, [2, [[1, [[2], [1]], 1], [4]], 2]))
    step = (10.0, 1.0, 0.0, 5.0)
    once = {"shared_read_once": True, "group_ms": 5.0}
    return [
        Case("context", context, _machine(100, 10, 1, 100), ("eager",)),
        Case("dedup", context, _machine(100, 10, 1, 100, **once), ("eager",)),
        Case("slots", _requests(*two), _machine(*step), ("off",), max_requests=1),
        Case("kv", _requests(*two), _machine(*step, max_kv_tokens=20), ("off",)),
        Case("chunk", _requests(*late), _machine(*step, chunk_tokens=8), ("off",)),
        Case("nested", nested, _machine(*step), ("eager",)),
    ]


def run_exact_cases() -> list[dict[str, Any]]:
    """Every case under each of its policies (docs/benchmark.md, "Simulator")."""
    cases = [_five(), *_small_cases(), _medium()]
    return [_run(case, policy) for case in cases for policy in case.policies]


def _run(case: Case, policy: str) -> dict[str, Any]:
    base = PolicyParams(ttft_slo_ms=case.ttft_slo_ms, tpot_slo_ms=case.tpot_slo_ms)
    params = updated_params(base, parse_policy(policy))
    options = EngineOptions(max_requests=case.max_requests, sees_stalls=False)
    simulation = Simulation(case.requests, params, case.machine, options).run()
    slos_ms = {"ttft": case.ttft_slo_ms, "tpot": case.tpot_slo_ms}
    outcomes = [request.outcome() for request in simulation.intake.sent]
    scored = score(outcomes, slos_ms, simulation.now_ms / 1000)
    met = [o.meets(slos_ms) for o in outcomes]
    met_critical = [o.meets(slos_ms, critical=True) for o in outcomes]
    return {
        "case": case.name,
        "policy": policy,
        "end_ms": [o.ended_ms for o in outcomes],
        "first_token_ms": [o.first_token_ms for o in outcomes],
        "steps": " ".join(f"{kind}{at:g}:{n}" for kind, at, n in simulation.steps),
        "num_steps": simulation.totals.num_steps,
        "num_rows": simulation.totals.num_rows_admitted,
        "prefill_ms": simulation.totals.prefill_ms,
        "num_ttft_met": sum(o.ttft_ms <= case.ttft_slo_ms for o in outcomes),
        "met": met,
        "met_critical": met_critical,
        "good_tokens": sum(
            o.num_tokens for o, ok in zip(outcomes, met, strict=True) if ok
        ),
        "good_tokens_critical": sum(
            o.num_tokens for o, ok in zip(outcomes, met_critical, strict=True) if ok
        ),
        "total_output_tokens": scored["total_output_tokens"],
        "critical_tokens": sum(o.num_critical_tokens for o in outcomes),
        "token_goodput": scored["token_goodput"],
        "token_goodput_critical": scored["token_goodput_critical"],
    }
