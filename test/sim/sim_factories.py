"""Small machines and workloads for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from sglang_taper.policy.types import LatencyCoefficients, PolicyParams
from sglang_taper.sim.intake import EngineOptions
from sglang_taper.sim.loop import Simulation
from sglang_taper.sim.machine import Machine, Prefill
from sglang_taper.workload.requests import PlannedRequest
from sglang_taper.workload.shape import make_shape

STEP = LatencyCoefficients(10.0, 1.0, 0.01, trusted=True)
MACHINE = Machine(STEP, Prefill(5.0, 1.0), chunk_tokens=16)


def requests(*rows: tuple[float, int, list[Any]]) -> list[PlannedRequest]:
    """(arrival ms, prompt tokens, phases) of each."""
    return [PlannedRequest(at, make_shape(prompt, path)) for at, prompt, path in rows]


def steps_of(simulation: Simulation) -> str:
    return " ".join(f"{kind}{at:g}:{n}" for kind, at, n in simulation.steps)


def run(
    planned: list[PlannedRequest],
    policy: str = "eager",
    machine: Machine = MACHINE,
    **options: Any,
) -> Simulation:
    """Play `planned` with SLOs of 1000 and 20 ms."""
    hold = options.pop("prefill_hold_s", "off")
    concurrency = options.pop("concurrency", None)
    params = PolicyParams(
        policy=policy, ttft_slo_ms=1000.0, tpot_slo_ms=20.0, prefill_hold_s=hold
    )
    engine = EngineOptions(**options)
    return Simulation(planned, params, machine, engine, concurrency=concurrency).run()


def path_strategy(depth: int = 2) -> st.SearchStrategy[list[Any]]:
    serial = st.integers(1, 6)
    if depth == 0:
        return st.lists(serial, min_size=1, max_size=2)
    fork = st.lists(path_strategy(depth - 1), min_size=1, max_size=4)
    return st.lists(serial | fork, min_size=1, max_size=3)


def planned_strategy() -> st.SearchStrategy[PlannedRequest]:
    def make(at_ms: float, prompt: int, path: list[Any]) -> PlannedRequest:
        return PlannedRequest(at_ms, make_shape(prompt, [1, *path]))

    return st.builds(
        make,
        st.sampled_from([0.0, 7.0, 90.0, 900.0]),
        st.integers(1, 40),
        path_strategy(),
    )
