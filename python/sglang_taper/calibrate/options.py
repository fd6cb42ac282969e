"""Flags of `sglang-taper calibrate`. Light: every `--help` comes here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from sglang_taper.errors import FieldError
from sglang_taper.protocol import check_positive
from sglang_taper.server_options import ServerOptions, add_server_flags

OUTPUT = "latency-profile.json"
BUDGET_S, MAX_BUDGET_S = 120.0, 86_400.0


@dataclass(frozen=True)
class CalibrateOptions(ServerOptions):
    """What the user asked for; `plot` None means beside the profile, if possible."""

    output: str = OUTPUT
    plot: str | None = None
    budget_s: float = BUDGET_S

    def __post_init__(self) -> None:
        check_positive("--budget-s", self.budget_s, MAX_BUDGET_S)
        super().__post_init__()
        for flag, name in (("--output", self.output), ("--plot", self.plot)):
            if name is not None and not Path(name).absolute().parent.is_dir():
                raise FieldError(flag, name, "a file in a folder that exists")

    @property
    def plot_path(self) -> Path:
        return Path(self.plot) if self.plot else Path(self.output).with_suffix(".png")

    @property
    def partial_path(self) -> Path:
        return Path(self.output + ".partial")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare every field of CalibrateOptions on `parser`."""
    add = parser.add_argument
    add_server_flags(parser, "calibrate")
    add(
        "--output",
        default=OUTPUT,
        metavar="FILE",
        help="the profile, JSON for --latency-profile (default: %(default)s); what is "
        "measured so far is kept in FILE.partial until it is complete",
    )
    add(
        "--plot",
        metavar="FILE",
        help="residual plot (default: the profile's name with .png; needs matplotlib)",
    )
    add(
        "--budget-s",
        type=float,
        default=BUDGET_S,
        metavar="S",
        help="seconds to measure for, once the server is ready (default: %(default)g)",
    )
