"""The flags of `sglang-taper simulate`."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import msgspec

from sglang_taper.changes import parse_policy, split_policies
from sglang_taper.errors import FieldError
from sglang_taper.policy.admission import make_policy
from sglang_taper.sim.intake import JOINS, EngineOptions
from sglang_taper.sim.machine import Machine, profile_names, read_machine
from sglang_taper.sim.run import PREDICTORS, Handicap
from sglang_taper.workload.flags import add_flags as add_workload_flags
from sglang_taper.workload.flags import spec_from
from sglang_taper.workload.requests import WorkloadSpec

DEFAULT_POLICIES = (
    "off,eager,cap:cap=2,taper-paper:rho=0.8:deadline=progress,"
    "taper-paper:rho=0.5:deadline=progress,taper-paper:rho=0.3,taper:rho=0.3,ledger"
)


@dataclass(frozen=True)
class SimulateOptions:
    """Everything one call of `sglang-taper simulate` runs."""

    machine: Machine
    profile: str
    workloads: list[WorkloadSpec]
    policies: list[str]
    rhos: list[float]
    prefill_hold_s: object
    ttft_slo_ms: float
    tpot_slos_ms: list[float]
    tpot_slo_factors: list[float]
    engine: EngineOptions
    handicaps: list[Handicap]
    ablations: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> SimulateOptions:
        """Raises FieldError for a value that is not acceptable."""
        policies = split_policies(args.policies)
        for policy in policies:
            make_policy(str(parse_policy(policy)["policy"]))
        if len(set(policies)) < len(policies):
            raise FieldError("--policies", args.policies, "every policy once")
        seeds = _numbers("--seeds", args.seeds, -1e15, 1e15)
        return cls(
            machine=_machine(args),
            profile=args.profile,
            workloads=[spec_from(args, int(seed)) for seed in seeds],
            policies=policies,
            rhos=_numbers("--rho", args.rho, 0, 1),
            prefill_hold_s=parse_policy(f"off:prefill_hold_s={args.prefill_hold_s}")[
                "prefill_hold_s"
            ],
            ttft_slo_ms=_numbers("--ttft-slo-ms", args.ttft_slo_ms, 0, 1e12)[0],
            tpot_slos_ms=_numbers("--tpot-slo-ms", args.tpot_slo_ms, 1e-6, 1e12),
            tpot_slo_factors=_numbers("--tpot-slo-x", args.tpot_slo_x, 1e-6, 1e6),
            engine=_engine(args),
            handicaps=_handicaps(args),
            ablations=args.ablations,
        )


def _numbers(flag: str, text: str, low: float, high: float) -> list[float]:
    """A comma-separated list of numbers in [low, high]; empty for an empty text."""
    accepted = f"numbers from {low:g} to {high:g}, separated by commas"
    try:
        numbers = [float(part) for part in text.split(",") if part]
    except ValueError:
        raise FieldError(flag, text, accepted) from None
    if not all(low <= number <= high for number in numbers):
        raise FieldError(flag, text, accepted)
    return numbers


def _machine(args: argparse.Namespace) -> Machine:
    machine = read_machine(args.profile)
    if args.shared_read_once:
        decode = msgspec.structs.replace(machine.decode, shared_read_once=True)
        machine = msgspec.structs.replace(machine, decode=decode)
    if args.max_total_tokens is not None:
        machine = msgspec.structs.replace(machine, max_kv_tokens=args.max_total_tokens)
    if args.chunked_prefill_size is not None:
        if args.chunked_prefill_size < 1:
            flag = "--chunked-prefill-size"
            raise FieldError(flag, args.chunked_prefill_size, "at least 1")
        size = args.chunked_prefill_size
        machine = msgspec.structs.replace(machine, chunk_tokens=size)
    return machine


def _engine(args: argparse.Namespace) -> EngineOptions:
    for flag in ("max_requests", "max_running_requests"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise FieldError("--" + flag.replace("_", "-"), value, "at least 1")
    return EngineOptions(
        max_requests=args.max_requests or math.inf,
        max_rows=args.max_running_requests or math.inf,
        joins=args.joins,
        sees_stalls=not args.hide_stalls,
    )


def _handicaps(args: argparse.Namespace) -> list[Handicap]:
    biases = _numbers("--predictor-bias", args.predictor_bias, -0.9, 10)
    noises = _numbers("--predictor-noise", args.predictor_noise, 0, 10)
    return [
        Handicap(args.predictor, bias, noise, not args.no_replanning)
        for bias in biases or [0.0]
        for noise in noises or [0.0]
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser)
    _add_policy_flags(parser.add_argument_group("policies and SLOs"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_handicap_flags(parser.add_argument_group("ablations"))
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="also write all results here")
    out.add_argument(
        "--output-details", action="store_true", help="with --json: every request"
    )
    out.add_argument(
        "--exact-cases",
        action="store_true",
        help="run the small cases with a known outcome instead",
    )


def _add_policy_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policies",
        default=DEFAULT_POLICIES,
        metavar="A,B",
        help="NAME, cap:N or NAME:PARAM=VALUE:..., separated by commas "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--rho", default="", metavar="X,Y", help="run policies that use rho with each"
    )
    group.add_argument("--ttft-slo-ms", default="2000", metavar="MS")
    group.add_argument(
        "--tpot-slo-ms", default="", metavar="MS,MS", help="one or more targets"
    )
    group.add_argument(
        "--tpot-slo-x",
        default="",
        metavar="X,Y",
        help="targets as multiples of the mean time between tokens under off (default "
        "without --tpot-slo-ms: 1.15,1.3,1.5,2)",
    )
    group.add_argument("--seeds", default="0", metavar="N,M", help="runs of each")


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    names = ", ".join(profile_names())
    group.add_argument(
        "--profile", default="cpu", help=f"{names}, or a JSON file (default: cpu)"
    )
    group.add_argument("--max-requests", type=int, help="requests with a place")
    group.add_argument(
        "--max-running-requests", type=int, help="branches with a place, as on a server"
    )
    group.add_argument("--max-total-tokens", type=int, help="KV tokens")
    group.add_argument("--chunked-prefill-size", type=int, help="tokens per prefill")
    group.add_argument(
        "--shared-read-once",
        action="store_true",
        help="steps read the prefix that branches of a request share once",
    )
    group.add_argument(
        "--joins",
        choices=JOINS,
        default="kv",
        help="what a join computes again: kv nothing, tree all but the first branch "
        "(our server), text all branches (default: kv)",
    )
    group.add_argument(
        "--prefill-hold-s",
        default="off",
        metavar="S",
        help="hold prefills so many seconds, auto or off (default: off)",
    )


def _add_handicap_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ablations",
        action="store_true",
        help="run each policy that has a budget also without slack budget, without "
        "replanning, with a constant predictor, with prediction errors of 5 to 30 %% "
        "and over rho",
    )
    group.add_argument(
        "--predictor", default="exact", metavar="KIND", help=", ".join(PREDICTORS)
    )
    group.add_argument(
        "--predictor-bias", default="", metavar="X,Y", help="relative, e.g. -0.1,0.1"
    )
    group.add_argument(
        "--predictor-noise", default="", metavar="X,Y", help="relative, per step"
    )
    group.add_argument(
        "--no-replanning",
        action="store_true",
        help="keep the widths until a branch comes or goes",
    )
    group.add_argument(
        "--hide-stalls",
        action="store_true",
        help="tell policies that prefills take no time",
    )
