"""The console script `sglang-taper`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sglang_taper import __version__
from sglang_taper.errors import TaperError

STDOUT = "-"
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (2 for anything we refuse, 130 when
    interrupted)."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except TaperError as error:
        print(f"sglang-taper: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang-taper: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-taper",
        description="Branch parallelism under a slack budget (TAPER) for SGLang.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_check(commands)
    _add_demo(commands)
    _add_simulate(commands)
    _add_calibrate(commands)
    _add_explain(commands)
    return parser


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check", help="verify that every hook into SGLang is in place"
    )
    check.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STDOUT,
        help="write the facts as JSON to FILE, or to standard output instead of "
        "the table",
    )
    check.set_defaults(run=_check)


def _add_demo(commands: Any) -> None:
    from sglang_taper.demo.options import add_flags

    demo = commands.add_parser(
        "demo", help="a forking program, then off, eager and taper on a live server"
    )
    add_flags(demo)
    demo.set_defaults(run=_demo)


def _add_simulate(commands: Any) -> None:
    from sglang_taper.sim.options import add_flags

    simulate = commands.add_parser(
        "simulate", help="policies on a virtual clock: goodput without a server"
    )
    add_flags(simulate)
    simulate.set_defaults(run=_simulate)


def _add_calibrate(commands: Any) -> None:
    from sglang_taper.calibrate.options import add_flags

    calibrate = commands.add_parser(
        "calibrate", help="measure a step-latency profile for --latency-profile"
    )
    add_flags(calibrate)
    calibrate.set_defaults(run=_calibrate)


def _add_explain(commands: Any) -> None:
    from sglang_taper.explain import add_flags, run_explain

    explain = commands.add_parser(
        "explain", help="what happened to one request of a running server"
    )
    add_flags(explain)
    explain.set_defaults(run=run_explain)


def _check(args: argparse.Namespace) -> int:
    from sglang_taper.engine.check import check_hooks

    facts = check_hooks()
    text = json.dumps(facts, indent=1)
    if args.json == STDOUT:
        print(text)
    else:
        if args.json:
            Path(args.json).write_text(text + "\n")
        print(format_check(facts))
    return 0 if facts["ok"] else 2


def _demo(args: argparse.Namespace) -> int:
    from sglang_taper.demo.options import DemoOptions

    options = DemoOptions.from_args(args)
    # Imports SGLang's frontend: only once the flags are known to be good.
    from sglang_taper.demo.run import run_demo

    return run_demo(options)


def _simulate(args: argparse.Namespace) -> int:
    from sglang_taper.extensions import load_extensions
    from sglang_taper.sim.command import run_command

    load_extensions()
    return run_command(args)


def _calibrate(args: argparse.Namespace) -> int:
    from sglang_taper.calibrate.options import CalibrateOptions

    options = CalibrateOptions.from_args(args)
    from sglang_taper.calibrate.run import run_calibrate

    return run_calibrate(options)


def format_check(facts: dict[str, Any]) -> str:
    """The table of `sglang-taper check` as text."""
    width = max(len(hook["id"]) for hook in facts["hooks"])
    lines = [
        f"{hook['id']:{width}}  {hook['kind']:8}  {hook['process']:9}  {hook['state']}"
        for hook in facts["hooks"]
    ]
    verdict = "all hooks in place" if facts["ok"] else "NOT in place"
    if facts["problem"]:
        verdict += f": {facts['problem']}"
    lines.append(f"sglang {facts['sglang']}, {facts['platform']}: {verdict}")
    return "\n".join(lines)
