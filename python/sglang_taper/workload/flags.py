"""The flags that describe a workload, the same for simulated and real servers."""

from __future__ import annotations

import argparse
from typing import Any

from sglang_taper.errors import FieldError
from sglang_taper.workload.arrivals import parse_arrivals
from sglang_taper.workload.parametric import ShapeParams
from sglang_taper.workload.requests import WorkloadSpec

# (flag, field of ShapeParams, what it is)
_SHAPE_FLAGS = (
    ("--pdr", "pdr", "share of requests that fork"),
    ("--pts", "pts", "share of a forking request's tokens that are in branches"),
    ("--fan-out", "fan_out", "branches per fork, LOW-HIGH"),
    ("--stages", "stages", "forks one after the other, LOW-HIGH"),
    ("--depth", "depth", "nesting levels of forks"),
    ("--branch-cv", "branch_cv", "variation of the lengths of the branches of a fork"),
    ("--prompt-tokens", "prompt_tokens", "mean prompt"),
    ("--serial-tokens", "serial_tokens", "mean answer of a request that does not fork"),
    (
        "--decomposable-factor",
        "decomposable_factor",
        "how many times longer the answer of one that forks is",
    ),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "workload"; `spec_from` reads it."""
    group = parser.add_argument_group("workload")
    group.add_argument("--num-prompts", type=int, default=400, help="requests sent")
    group.add_argument(
        "--arrivals",
        default="closed:8",
        metavar="PROCESS",
        help="poisson, gamma:CV, trace:FILE (Azure CSV or Mooncake JSONL) or closed:C, "
        "which keeps C requests in flight (default: closed:8)",
    )
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="PER_S",
        help="mean rate of an open loop; a trace is scaled to it",
    )
    group.add_argument(
        "--slowdown-factor", type=float, default=1.0, help="stretch arrival times"
    )
    group.add_argument(
        "--fork-trees",
        metavar="FILE",
        help="take shapes from real fork trees (JSONL); with --pdr that share from its "
        "forking ones, and the rest drawn",
    )
    group.add_argument(
        "--shorten", type=float, default=1.0, help="divide the counts of --fork-trees"
    )
    for flag, name, text in _SHAPE_FLAGS:
        default = getattr(ShapeParams(), name)
        shown = "-".join(map(str, default)) if isinstance(default, tuple) else default
        group.add_argument(
            flag, dest=name, metavar="X", help=f"{text} (default: {shown})"
        )


def spec_from(args: argparse.Namespace, seed: int = 0) -> WorkloadSpec:
    """The workload that the flags describe; raises FieldError."""
    for flag, value in (
        ("--request-rate", args.request_rate),
        ("--slowdown-factor", args.slowdown_factor),
        ("--shorten", args.shorten),
    ):
        if value is not None and not 0 < value < 1e9:
            raise FieldError(flag, value, "above 0 and below 1e9")
    given = {name: getattr(args, name) for _, name, _ in _SHAPE_FLAGS}
    return WorkloadSpec(
        num_requests=args.num_prompts,
        seed=seed,
        arrivals=parse_arrivals(args.arrivals),
        rate_per_s=args.request_rate,
        slowdown=args.slowdown_factor,
        params=_shape_params({k: v for k, v in given.items() if v is not None}),
        fork_trees=args.fork_trees,
        shorten=args.shorten,
        mix_pdr=args.fork_trees is not None and args.pdr is not None,
    )


def _shape_params(given: dict[str, str]) -> ShapeParams:
    defaults = ShapeParams()
    changes: dict[str, Any] = {}
    for name, text in given.items():
        default = getattr(defaults, name)
        try:
            if isinstance(default, tuple):
                low, _, high = text.partition("-")
                changes[name] = (int(low), int(high or low))
            else:
                changes[name] = type(default)(text)
        except ValueError:
            form = "LOW-HIGH" if isinstance(default, tuple) else "a number"
            raise FieldError("--" + name.replace("_", "-"), text, form) from None
    return ShapeParams(**changes)
