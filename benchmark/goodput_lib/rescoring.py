"""Saved results at other SLOs: for policies that did not look at them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from goodput_lib.policies import parse_policies
from goodput_lib.tables import Result
from sglang_taper.errors import FieldError
from sglang_taper.workload.score import Outcome, score

NUM_POINTS = 60


def has_details(result: Result) -> bool:
    return "requests" in result


def outcomes_in(result: Result) -> list[Outcome]:
    """The requests of a result written with `--output-details`."""
    return msgspec.convert(result["requests"], list[Outcome])


def is_slo_blind(result: Result) -> bool:
    (contender,) = parse_policies(result["policy"])
    return contender.is_slo_blind


def rescored(
    results: Sequence[Result], slos_ms: Mapping[str, float]
) -> list[dict[str, Any]]:
    """SLO-blind runs at other SLOs, each once; raises FieldError without details.

    A policy that looks at its SLO would have done something else: it is left out.
    """
    blind = [result for result in results if is_slo_blind(result)]
    if not any(map(has_details, blind)):
        accepted = "results written with --output-details"
        raise FieldError("--rescore", list(slos_ms), accepted)
    return [
        {
            **result,
            **score(outcomes_in(result), slos_ms, result["duration"]),
            "tpot_slo_x": None,
        }
        for result in _one_per_run(blind)
        if has_details(result)
    ]


def _one_per_run(results: Sequence[Result]) -> Iterator[Result]:
    """Of results that score one run at several SLOs, the first."""
    seen = set()
    for result in results:
        if result["run"] not in seen:
            seen.add(result["run"])
            yield result


def goodput_over_tpot(
    results: Sequence[Result],
) -> tuple[list[float], list[float]] | None:
    """(TPOT targets, mean token goodput over rounds) of an SLO-blind policy."""
    runs = [result for result in _one_per_run(results) if is_slo_blind(result)]
    if not runs:
        return None
    outcomes = [outcomes_in(run) for run in runs]
    tpots = sorted(o.tpot_ms for one in outcomes for o in one if o.succeeded)
    if not tpots or math.isclose(tpots[0], tpots[-1]):
        return None
    low, high = 0.8 * tpots[0], 1.1 * tpots[-1]
    targets = [low + i * (high - low) / NUM_POINTS for i in range(NUM_POINTS + 1)]
    others = {k: v for k, v in runs[0]["goodput_slos_ms"].items() if k != "tpot"}

    def goodput(tpot: float) -> float:
        slos_ms = {**others, "tpot": tpot}
        return fmean(
            score(one, slos_ms, run["duration"])["token_goodput"]
            for run, one in zip(runs, outcomes, strict=True)
        )

    return targets, [goodput(tpot) for tpot in targets]
