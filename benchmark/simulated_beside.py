"""Simulated runs beside the real ones that `benchmark/goodput.py` wrote.

    python benchmark/simulated_beside.py F.jsonl

Every run of F whose shapes were drawn is played again on a virtual clock: the same
requests, SLOs and policy parameters, on a machine whose decode steps cost what the
server had learned by the end of that run, and its prefills what they took in it (both
over all runs with `--one-model`). The table has means over rounds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec
from goodput_lib.fitting import fitted
from goodput_lib.tables import as_markdown
from report import read_results

from sglang_taper.changes import updated_params
from sglang_taper.errors import FieldError, TaperError
from sglang_taper.policy.types import PolicyParams
from sglang_taper.sim.intake import EngineOptions
from sglang_taper.sim.machine import Machine, Prefill, make_machine
from sglang_taper.sim.run import Handicap, result_of, simulate
from sglang_taper.workload.arrivals import Arrivals
from sglang_taper.workload.parametric import ShapeParams
from sglang_taper.workload.requests import WorkloadSpec, make_requests

COEFFICIENTS = ("a_ms", "b_ms_per_row", "c_ms_per_token")
HEADER = (
    *("policy", "TPOT ms", "goodput tok/s", "simulated", "ratio"),
    *("attained", "simulated", "points apart"),
)
Result = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        results = comparable(read_results(args.files))
        given = parse_prefill(args.prefill_ms) if args.prefill_ms else None
        costs = [(model_of(result), given or prefill_of(result)) for result in results]
        if args.one_model:
            costs = [mean_costs(costs)] * len(results)
        pairs = [
            (real, simulated(real, machine_of(*cost, real)))
            for real, cost in zip(results, costs, strict=True)
        ]
        print(table(pairs))
    except TaperError as error:
        print(f"simulated_beside.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument(
        "--prefill-ms",
        metavar="A,PER_TOKEN",
        help="what a prefill step costs: a fixed part, and a part for each token "
        "(default: what it took in these runs)",
    )
    parser.add_argument(
        "--one-model",
        action="store_true",
        help="the mean of what steps and prefills cost in all runs, instead of each "
        "its own",
    )
    return parser.parse_args(argv)


def comparable(results: Sequence[Result]) -> list[Result]:
    """Those the simulator can play; raises FieldError when there is none."""
    kept = [
        result
        for result in results
        if result["engine"] and is_drawn(result["workload"])
    ]
    if not kept:
        accepted = "results of our server with drawn shapes"
        raise FieldError("FILE", f"{len(results)} results", accepted)
    return kept


def is_drawn(header: Mapping[str, Any]) -> bool:
    """Whether the header says all that the requests were made of."""
    is_whole = not header["fork_trees"] and not header["share_dropped"]
    return bool(is_whole and header["parameters"])


def parse_prefill(text: str) -> Prefill:
    try:
        fixed_ms, ms_per_token = map(float, text.split(","))
    except ValueError:
        accepted = "two numbers with a comma between"
        raise FieldError("--prefill-ms", text, accepted) from None
    if not (0 <= fixed_ms < 1e6 and 0 <= ms_per_token < 1e6):
        raise FieldError("--prefill-ms", text, "from 0 to 1000000")
    return Prefill(fixed_ms, ms_per_token)


def model_of(result: Result) -> dict[str, float]:
    return {name: result["engine"]["latency_model"][name] for name in COEFFICIENTS}


def prefill_of(result: Result) -> Prefill:
    """What a prefill cost in this run; raises FieldError if it does not say."""
    found = result["engine"].get("prefill_ms")
    if not found:
        accepted = "a prefill cost in the results, or one given with --prefill-ms"
        raise FieldError("FILE", result["run"], accepted)
    return Prefill(*found)


def mean_costs(
    costs: Sequence[tuple[dict[str, float], Prefill]],
) -> tuple[dict[str, float], Prefill]:
    models, prefills = zip(*costs, strict=True)
    model = {name: fmean(model[name] for model in models) for name in COEFFICIENTS}
    fixed_ms = fmean(prefill.a_ms for prefill in prefills)
    return model, Prefill(fixed_ms, fmean(p.ms_per_token for p in prefills))


def machine_of(model: Mapping[str, float], prefill: Prefill, result: Result) -> Machine:
    server = result["server"]
    facts = {**model, "shared_read_once": True}
    return msgspec.structs.replace(
        make_machine(facts),
        prefill=prefill,
        max_kv_tokens=server["max_total_num_tokens"],
        chunk_tokens=server["arguments"]["chunked_prefill_size"],
    )


def simulated(result: Result, machine: Machine) -> dict[str, Any]:
    """The same run on a virtual clock, with SGLang's keys as the real one."""
    header = result["workload"]
    spec = spec_of(header)
    low, high = header["prompt_limits"]
    slos_ms = result["goodput_slos_ms"]
    planned = result["planned_slos_ms"] or slos_ms
    params = updated_params(
        PolicyParams(ttft_slo_ms=planned["ttft"], tpot_slo_ms=planned["tpot"]),
        result["params"],
    )
    arguments = result["server"]["arguments"]
    engine = EngineOptions(
        max_rows=arguments["max_running_requests"],
        joins="tree",
        late_results=not arguments["disable_overlap_schedule"],
    )
    run = simulate(
        fitted(make_requests(spec), (low, high), math.inf).requests,
        params,
        machine,
        engine,
        Handicap(),
        spec.arrivals.concurrency,
        spec.seed,
    )
    return result_of(run, slos_ms)


def spec_of(header: Mapping[str, Any]) -> WorkloadSpec:
    """The workload of a result, from its header."""
    return WorkloadSpec(
        num_requests=header["num_requests"],
        seed=header["seed"],
        arrivals=msgspec.convert(header["arrivals"], Arrivals),
        rate_per_s=header["rate_per_s"],
        slowdown=header["slowdown"],
        params=msgspec.convert(header["parameters"], ShapeParams, strict=False),
    )


def table(pairs: Sequence[tuple[Result, Result]]) -> str:
    """A row for each policy and SLO: real, simulated, how far apart."""
    groups: dict[tuple[str, str], list[tuple[Result, Result]]] = {}
    for real, played in pairs:
        key = (real["policy"], f"{real['goodput_slos_ms']['tpot']:.0f}")
        groups.setdefault(key, []).append((real, played))
    return as_markdown(HEADER, [_row(*key, group) for key, group in groups.items()])


def _row(policy: str, tpot: str, group: Sequence[tuple[Result, Result]]) -> list[str]:
    goodput, played = (
        fmean(r["token_goodput"] for r in side) for side in zip(*group, strict=True)
    )
    met, met_played = (
        fmean(r["slo_attainment"] for r in side) for side in zip(*group, strict=True)
    )
    ratio = f"{played / goodput:.2f}" if goodput else "-"
    points = f"{100 * (met_played - met):+.0f}"
    return [
        *(f"`{policy}`", tpot, f"{goodput:.1f}", f"{played:.1f}", ratio),
        *(f"{met:.0%}", f"{met_played:.0%}", points),
    ]


if __name__ == "__main__":
    sys.exit(main())
