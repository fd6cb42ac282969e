"""The flags of `benchmark/goodput.py`, with SGLang's names where it has one."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from goodput_lib.execute import Manner
from goodput_lib.policies import Contender, parse_policies
from goodput_lib.presets import PRESETS, preset_flags
from sglang_taper.errors import FieldError
from sglang_taper.workload.arrivals import Arrivals
from sglang_taper.workload.flags import add_flags as add_workload_flags
from sglang_taper.workload.flags import spec_from
from sglang_taper.workload.requests import WorkloadSpec
from sglang_taper.workload.score import parse_slos

DEFAULT_TPOT_FACTORS = "1.15,1.3,1.5,2.0"


@dataclass(frozen=True)
class Options:
    """Everything one call runs. `args` is what was parsed, the workload's flags too."""

    args: argparse.Namespace
    policies: list[Contender]
    slos_ms: dict[str, float]
    tpot_factors: list[float]
    rates: list[float]
    rate_factors: list[float]
    clip_prompt: tuple[int, int]
    max_request_tokens: float
    manner: Manner
    server_flags: list[str]
    taper_flags: list[str]
    programs: list[str]

    @classmethod
    def from_argv(cls, argv: Sequence[str] | None = None) -> Options:
        """Raises FieldError for a value that is not acceptable."""
        args = parse_args(argv)
        options = cls(
            args=args,
            policies=parse_policies(args.policies),
            slos_ms=parse_slos(args.goodput),
            tpot_factors=_numbers("--tpot-x", args.tpot_x),
            rates=_numbers("--request-rates", args.request_rates),
            rate_factors=_numbers("--rate-x", args.rate_x),
            clip_prompt=_range("--clip-prompt", args.clip_prompt),
            max_request_tokens=args.max_request_tokens or math.inf,
            manner=Manner(args.branch_own_tokens, args.temperature),
            server_flags=shlex.split(args.server_flags),
            taper_flags=shlex.split(args.taper_flags),
            programs=[name for name in args.programs.split(",") if name],
        )
        options._check()
        return options

    def _check(self) -> None:
        args = self.args
        spec = self.spec(0)
        concurrency = spec.arrivals.concurrency or 0
        if args.num_prompts <= concurrency:
            accepted = f"more than the {concurrency} in flight"
            raise FieldError("--num-prompts", args.num_prompts, accepted)
        for flag, value, low in (
            ("--rounds", args.rounds, 1),
            ("--branch-own-tokens", args.branch_own_tokens, 0),
            ("--test-step-cost-ms", args.test_step_cost_ms, 0),
            ("--measure-concurrency", args.measure_concurrency, 1),
        ):
            if value < low:
                raise FieldError(flag, value, f"at least {low}")
        if not 0.5 <= args.planned_share <= 1:
            raise FieldError("--planned-share", args.planned_share, "0.5 to 1")
        if not args.slo_procedure and "tpot" not in self.slos_ms:
            accepted = "a tpot:MS, unless --slo-procedure finds it"
            raise FieldError("--goodput", " ".join(args.goodput), accepted)
        if self.rate_factors and not args.slo_procedure:
            raise FieldError("--rate-x", args.rate_x, "only with --slo-procedure")
        self._check_rates(spec)

    def _check_rates(self, spec: WorkloadSpec) -> None:
        needs = not spec.arrivals.is_closed and spec.arrivals.trace is None
        given = self.rates or self.rate_factors or self.args.request_rate
        if needs and not given:
            accepted = "a rate, as --request-rate, --request-rates or --rate-x"
            raise FieldError("--arrivals", self.args.arrivals, accepted)
        if spec.arrivals.is_closed and (self.rates or self.rate_factors):
            accepted = "an open loop where rates are given"
            raise FieldError("--arrivals", self.args.arrivals, accepted)

    def spec(self, round_: int, rate_per_s: float | None = None) -> WorkloadSpec:
        """The workload of a round: the same for every policy in it."""
        args = argparse.Namespace(**vars(self.args))
        args.request_rate = rate_per_s or args.request_rate
        return spec_from(args, args.seed + round_)

    @property
    def measuring(self) -> Arrivals:
        """The closed loop in which the SLO procedure measures `off`."""
        arrivals = self.spec(0).arrivals
        if arrivals.is_closed:
            return arrivals
        return Arrivals(concurrency=self.args.measure_concurrency)


def _numbers(flag: str, text: str) -> list[float]:
    accepted = "ascending numbers above 0, separated by commas"
    try:
        numbers = [float(part) for part in text.split(",") if part]
    except ValueError:
        raise FieldError(flag, text, accepted) from None
    if any(not 0 < number < 1e9 for number in numbers) or numbers != sorted(numbers):
        raise FieldError(flag, text, accepted)
    return numbers


def _range(flag: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high):
        return int(low), int(high)
    raise FieldError(flag, text, "LOW-HIGH, both at least 1")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What is given wins over the preset, that over the defaults."""
    parser = make_parser()
    given = parser.parse_args(argv)
    if given.preset is None:
        return given
    return parser.parse_args(argv, parser.parse_args(preset_flags(given.preset)))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Token goodput of branch policies on real servers."
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a whole comparison")
    add_workload_flags(parser)
    _add_workload_flags(parser.add_argument_group("workload of a real server"))
    _add_comparison_flags(parser.add_argument_group("comparison"))
    _add_server_flags(parser.add_argument_group("server"))
    _add_output_flags(parser.add_argument_group("output"))
    return parser


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--seed", type=int, default=0, help="of round 0; every round has its own")
    add("--clip-prompt", default="1-1000000", metavar="LOW-HIGH", help="prompt tokens")
    add(
        "--max-request-tokens",
        type=int,
        help="leave longer requests out; the server's pool is a limit anyway",
    )
    add(
        "--branch-own-tokens",
        type=int,
        default=0,
        help="tokens of its own that a branch adds to the prefix (default: 0)",
    )
    add("--temperature", type=float, default=1.0)
    add(
        "--programs",
        default="",
        metavar="A,B",
        help="programs of benchmark/programs.py instead of shapes, parts of "
        "--serial-tokens on average",
    )


def _add_comparison_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--policies",
        default="off,eager,taper,ledger",
        metavar="A,B",
        help="as cap:2 or taper:deadline=progress,rho=0.8; stock: another server",
    )
    add("--rounds", type=int, default=3, help="times each is run, in turns")
    add("--goodput", nargs="+", default=["ttft:2000"], metavar="KEY:MS")
    add(
        "--slo-procedure",
        action="store_true",
        help="measure off first and take TPOT targets from it",
    )
    add(
        "--tpot-x",
        default=DEFAULT_TPOT_FACTORS,
        metavar="X,Y",
        help="targets of --slo-procedure, as multiples of the mean time between "
        "tokens under off (default: %(default)s)",
    )
    add("--request-rates", default="", metavar="R,S", help="an open loop at each rate")
    add(
        "--rate-x",
        default="",
        metavar="X,Y",
        help="the same, as multiples of what off serves in a closed loop",
    )
    add("--measure-concurrency", type=int, default=8, help="of that closed loop")
    add("--attainment", type=float, default=0.95, help="for rate_at_attainment")
    add(
        "--planned-share",
        type=float,
        default=1.0,
        help="share of the TPOT target that the server plans with",
    )
    add("--time-budget-s", type=float, help="start no further run after this long")
    add("--request-timeout-s", type=float, default=600.0)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", help="a running server with a branch policy")
    add("--stock-base-url", help="a running server without")
    add("--model-path", default="smollm2")
    add("--server-flags", default="", help="of the servers that are started")
    add(
        "--print-server-flags",
        action="store_true",
        help="print what a server for this would be started with, and end",
    )
    add("--taper-flags", default="", help="only of ours, as '--latency-profile FILE'")
    add(
        "--test-step-cost-ms",
        type=float,
        default=0.0,
        help="add this to every decode step (a test switch; results say so)",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output-file", metavar="F.jsonl", help="append one object per result")
    add("--output-details", action="store_true", help="with every request in it")
    add("--tag", help="stands in every result")
