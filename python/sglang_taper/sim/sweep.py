"""All runs of one call: workloads x policies x rho x SLOs x what is taken away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_taper.changes import parse_policy, updated_params
from sglang_taper.policy.types import PolicyParams
from sglang_taper.sim.loop import Simulation
from sglang_taper.sim.options import SimulateOptions
from sglang_taper.sim.run import (
    Handicap,
    outcomes_of,
    result_of,
    simulate,
)
from sglang_taper.workload.requests import (
    PlannedRequest,
    WorkloadSpec,
    make_requests,
    workload_header,
)
from sglang_taper.workload.score import mean_time_between_tokens_ms

# They do not look at SLOs: one run is scored against all of them.
SLO_BLIND = frozenset({"off", "eager", "cap"})
USES_RHO = frozenset({"taper", "taper-paper"})
DEFAULT_FACTORS = (1.15, 1.3, 1.5, 2.0)
ERRORS = (0.05, 0.1, 0.2, 0.3)
RHOS = (0.1, 0.2, 0.3, 0.5, 0.8, 1.0)


class Variant(msgspec.Struct, frozen=True):
    """A policy as it is run and shown."""

    label: str
    changes: dict[str, object]
    handicap: Handicap

    @property
    def is_slo_blind(self) -> bool:
        return self.changes["policy"] in SLO_BLIND


def variants(options: SimulateOptions) -> list[Variant]:
    """Every policy of `options` with every rho and handicap, in that order."""
    found: list[Variant] = []
    for text in options.policies:
        changes = parse_policy(text)
        takes_rho = changes["policy"] in USES_RHO and "rho" not in changes
        for rho in options.rhos if takes_rho and options.rhos else [None]:
            label = text if rho is None else f"{text}:rho={rho:g}"
            chosen = changes if rho is None else {**changes, "rho": rho}
            found += _with_handicaps(label, chosen, options)
    return found


def _with_handicaps(
    label: str, changes: dict[str, object], options: SimulateOptions
) -> Iterator[Variant]:
    if changes["policy"] in SLO_BLIND:
        yield Variant(label, changes, Handicap())
        return
    for handicap in options.handicaps:
        yield Variant(label + _suffix(handicap), changes, handicap)
    if options.ablations:
        yield from _ablations(label, changes)


def _ablations(label: str, changes: dict[str, object]) -> Iterator[Variant]:
    """The paper's own ablations of one policy.

    Without a slack budget nothing limits the step, which is `eager`.
    """
    no_budget = f"{label} (no slack budget)"
    yield Variant(no_budget, {"policy": "eager"}, Handicap())
    taken_away = [Handicap(replans=False), Handicap("constant"), Handicap("learned")]
    taken_away += [Handicap(bias=sign * e) for e in ERRORS for sign in (-1, 1)]
    taken_away += [Handicap(noise=e) for e in ERRORS]
    for handicap in taken_away:
        yield Variant(label + _suffix(handicap), changes, handicap)
    if changes["policy"] in USES_RHO:
        for rho in RHOS:
            yield Variant(f"{label} (rho {rho:g})", {**changes, "rho": rho}, Handicap())


def _suffix(handicap: Handicap) -> str:
    parts = []
    if not handicap.replans:
        parts.append("no replanning")
    if handicap.predictor != "exact":
        parts.append(f"{handicap.predictor} predictor")
    if handicap.bias:
        parts.append(f"bias {handicap.bias:+.0%}")
    if handicap.noise:
        parts.append(f"noise {handicap.noise:.0%}")
    return f" ({', '.join(parts)})" if parts else ""


def run_sweep(options: SimulateOptions, details: bool = False) -> Iterator[dict]:
    """One result per workload, policy and SLO, as it is ready. `details`: requests."""
    for spec in options.workloads:
        requests = make_requests(spec)
        header = workload_header(spec, requests)
        runs = _Runs(options, spec, requests)
        for variant in variants(options):
            for tpot_slo_ms in runs.tpot_slos_ms:
                result = runs.result(variant, tpot_slo_ms, details)
                yield {"profile": options.profile, "workload": header, **result}


class _Runs:
    """Runs of one workload; those that ignore SLOs are kept."""

    def __init__(
        self,
        options: SimulateOptions,
        spec: WorkloadSpec,
        requests: list[PlannedRequest],
    ) -> None:
        self.options, self.spec, self.requests = options, spec, requests
        self._kept: dict[str, Simulation] = {}
        self.tpot_slos_ms = options.tpot_slos_ms + self._from_factors()

    def _from_factors(self) -> list[float]:
        factors = self.options.tpot_slo_factors
        if not factors and not self.options.tpot_slos_ms:
            factors = list(DEFAULT_FACTORS)
        if not factors:
            return []
        off = self._run(Variant("off", {"policy": "off"}, Handicap()), 1.0)
        off_ms = mean_time_between_tokens_ms(outcomes_of(off))
        return [factor * off_ms for factor in factors]

    def result(
        self, variant: Variant, tpot_slo_ms: float, details: bool
    ) -> dict[str, Any]:
        began = time.process_time()
        simulation = self._run(variant, tpot_slo_ms)
        slos_ms = {"ttft": self.options.ttft_slo_ms, "tpot": tpot_slo_ms}
        facts = {
            "policy": variant.label,
            "params": msgspec.to_builtins(simulation.params),
            "handicap": msgspec.to_builtins(variant.handicap),
            "seed": self.spec.seed,
            **result_of(simulation, slos_ms),
            "cpu_s": time.process_time() - began,
        }
        if details:
            outcomes = [request.outcome() for request in simulation.intake.sent]
            facts["requests"] = msgspec.to_builtins(outcomes)
        return facts

    def _run(self, variant: Variant, tpot_slo_ms: float) -> Simulation:
        if variant.label in self._kept:
            return self._kept[variant.label]
        options = self.options
        slos = PolicyParams(ttft_slo_ms=options.ttft_slo_ms, tpot_slo_ms=tpot_slo_ms)
        simulation = simulate(
            self.requests,
            updated_params(
                slos, {"prefill_hold_s": options.prefill_hold_s, **variant.changes}
            ),
            options.machine,
            options.engine,
            variant.handicap,
            self.spec.arrivals.concurrency,
            self.spec.seed,
        )
        if variant.is_slo_blind:
            self._kept[variant.label] = simulation
        return simulation
