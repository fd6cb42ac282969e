"""Where which policy wins, simulated: machines x loads x shapes x SLOs.

    python benchmark/simulated_map.py [--profiles cpu,tp8] [--seeds 0] [--json FILE]

Loads: closed loops of two sizes, and open loops of 0.5 to 1.2 times what `off` can
carry with as many places as the larger closed loop has clients. Shapes: hardly ever
parallel, mixed, and wide. SLOs: multiples of the time between tokens under `off` in
the larger closed loop. Prints, for each policy, its token goodput against the best of
all in each regime (geometric mean, worst), its attainment, and in how many regimes it
is more than 3 % below the best; then the regimes where the last policy is. Simulated: a
projection, not a measurement. About ten minutes on one core for three profiles.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from sglang_taper.changes import parse_policy, updated_params
from sglang_taper.policy.types import PolicyParams
from sglang_taper.sim.intake import EngineOptions
from sglang_taper.sim.loop import Simulation
from sglang_taper.sim.machine import Machine, read_machine
from sglang_taper.sim.run import counted, outcomes_of, result_of
from sglang_taper.workload.arrivals import Arrivals
from sglang_taper.workload.parametric import ShapeParams
from sglang_taper.workload.requests import PlannedRequest, WorkloadSpec, make_requests
from sglang_taper.workload.score import mean_time_between_tokens_ms

POLICIES = (
    "off,eager,cap:cap=2,cap:cap=4,taper-paper:rho=0.8:deadline=progress,"
    "taper-paper:rho=0.5:deadline=progress,taper-paper:rho=0.3,taper:rho=0.3,ledger"
)
CLIENTS = {"cpu": (3, 8), "h200": (16, 48), "tp8": (32, 96), "old": (24, 64)}
SHAPES = {
    "serial": ShapeParams(pts=0.1, fan_out=(2, 4), stages=(1, 1)),
    "mixed": ShapeParams(),
    "wide": ShapeParams(pts=0.95, fan_out=(8, 12), stages=(1, 1), pdr=0.4),
}
OPEN_LOADS = (0.5, 0.8, 1.0, 1.2)
SLO_FACTORS = (1.15, 1.3, 1.6, 2.5)
# Goodput below this share of the best is a loss.
TOLERANCE = 0.97


class Regime(msgspec.Struct, frozen=True):
    """One cell of the map; `load` None: the closed loop of `clients`."""

    profile: str
    shape: str
    clients: int
    load: float | None

    @property
    def label(self) -> str:
        load = "closed" if self.load is None else f"{self.load:g} x off, places"
        return f"{self.profile} {self.shape} {load} {self.clients}"


def regimes(profiles: Sequence[str]) -> Iterator[Regime]:
    for profile in profiles:
        few, many = CLIENTS[profile]
        for shape in SHAPES:
            yield Regime(profile, shape, few, None)
            yield Regime(profile, shape, many, None)
            yield from (Regime(profile, shape, many, load) for load in OPEN_LOADS)


class Cell:
    """Runs one regime; SLO-blind runs are kept and scored at every SLO."""

    def __init__(self, regime: Regime, seed: int) -> None:
        self.machine = read_machine(regime.profile)
        self.ttft_slo_ms = 3000.0 if regime.profile == "cpu" else 2000.0
        params = SHAPES[regime.shape]
        if regime.profile == "cpu":
            params = msgspec.structs.replace(
                params, prompt_tokens=60.0, serial_tokens=40.0
            )
        many = CLIENTS[regime.profile][1]
        closed = WorkloadSpec(
            num_requests=max(200, 8 * many),
            seed=seed,
            arrivals=Arrivals(concurrency=many),
            params=params,
        )
        self.pace_ms, capacity = measure_off(closed, self.machine)
        self.concurrency: int | None = regime.clients
        self.engine = EngineOptions()
        spec = msgspec.structs.replace(
            closed, arrivals=Arrivals(concurrency=regime.clients)
        )
        if regime.load is not None:
            self.concurrency = None
            self.engine = EngineOptions(max_requests=many)
            rate = regime.load * capacity
            spec = msgspec.structs.replace(spec, arrivals=Arrivals(), rate_per_s=rate)
        self.requests = make_requests(spec)
        self._kept: dict[str, Simulation] = {}

    def result(self, policy: str, factor: float) -> dict[str, Any]:
        tpot_slo_ms = factor * self.pace_ms
        simulation = self._kept.get(policy)
        if simulation is None:
            slos = PolicyParams(ttft_slo_ms=self.ttft_slo_ms, tpot_slo_ms=tpot_slo_ms)
            params = updated_params(slos, parse_policy(policy))
            simulation = play(
                self.requests, params, self.machine, self.engine, self.concurrency
            )
        if policy.startswith(("off", "eager", "cap")):
            self._kept[policy] = simulation
        slos_ms = {"ttft": self.ttft_slo_ms, "tpot": tpot_slo_ms}
        return result_of(simulation, slos_ms)


def play(
    requests: list[PlannedRequest],
    params: PolicyParams,
    machine: Machine,
    engine: EngineOptions,
    concurrency: int | None,
) -> Simulation:
    return Simulation(requests, params, machine, engine, concurrency=concurrency).run()


def measure_off(spec: WorkloadSpec, machine: Machine) -> tuple[float, float]:
    """Time between tokens (ms) and requests per second of `off` in a closed loop."""
    params, clients = PolicyParams(policy="off"), spec.arrivals.concurrency
    off = play(make_requests(spec), params, machine, EngineOptions(), clients)
    outcomes, duration_s = counted(off)
    return mean_time_between_tokens_ms(outcomes_of(off)), len(outcomes) / duration_s


def measure(
    regime: Regime, policies: Sequence[str], seeds: Sequence[int]
) -> Iterator[dict[str, Any]]:
    cells = [Cell(regime, seed) for seed in seeds]
    for factor in SLO_FACTORS:
        row: dict[str, Any] = {"regime": regime.label, "slo_factor": factor}
        for policy in policies:
            found = [cell.result(policy, factor) for cell in cells]
            row[policy] = {
                name: fmean(result[name] for result in found)
                for name in (
                    "token_goodput",
                    "slo_attainment",
                    "token_goodput_critical",
                )
            }
        yield row


def against_best(row: dict[str, Any], policy: str, policies: Sequence[str]) -> float:
    """Token goodput of `policy` over that of the best; 1 where all have none."""
    best = max(row[other]["token_goodput"] for other in policies)
    return row[policy]["token_goodput"] / best if best else 1.0


def show(rows: list[dict[str, Any]], policies: Sequence[str]) -> None:
    width = max(map(len, policies))
    print(f"{len(rows)} regimes, against the best of all policies in each")
    print(f"{'policy':{width}}   mean  worst  attained  below {TOLERANCE:g}")
    for policy in policies:
        shares = [against_best(row, policy, policies) for row in rows]
        mean = math.exp(fmean(math.log(max(share, 1e-3)) for share in shares))
        attained = fmean(row[policy]["slo_attainment"] for row in rows)
        lost = sum(share < TOLERANCE for share in shares)
        print(
            f"{policy:{width}} {mean:6.3f} {min(shares):6.3f} {attained:9.3f} {lost:6}"
        )
    last = policies[-1]
    for row in rows:
        share = against_best(row, last, policies)
        if share < TOLERANCE:
            best = max(policies, key=lambda name: row[name]["token_goodput"])
            attained = [row[name]["slo_attainment"] for name in (last, best)]
            print(
                f"{last} {share:.3f} of {best}: {row['regime']}, TPOT x"
                f"{row['slo_factor']:g}, attained {attained[0]:.2f} / {attained[1]:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", default="cpu,tp8,h200", help=", ".join(CLIENTS))
    parser.add_argument(
        "--policies", default=POLICIES, help="the last is the judged one"
    )
    parser.add_argument("--seeds", default="0", help="runs averaged, e.g. 0,1,2")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    args = parser.parse_args()
    policies = args.policies.split(",")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows: list[dict[str, Any]] = []
    for regime in regimes(args.profiles.split(",")):
        rows += measure(regime, policies, seeds)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    show(rows, policies)


if __name__ == "__main__":
    main()
