"""Flags of `sglang-taper calibrate`. Light: every `--help` comes here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from sglang_taper.errors import FieldError
from sglang_taper.models import DEFAULT_MODEL
from sglang_taper.protocol import check_positive

OUTPUT = "latency-profile.json"
BUDGET_S, MAX_BUDGET_S = 120.0, 86_400.0


@dataclass(frozen=True)
class CalibrateOptions:
    """What the user asked for; `plot` None means beside the profile, if possible."""

    model_path: str = DEFAULT_MODEL
    url: str | None = None
    api_key: str | None = None
    output: str = OUTPUT
    plot: str | None = None
    budget_s: float = BUDGET_S
    server_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive("--budget-s", self.budget_s, MAX_BUDGET_S)
        if self.url and self.server_flags:
            shown = " ".join(self.server_flags)
            raise FieldError("server flags", shown, "none together with --url")
        for flag, name in (("--output", self.output), ("--plot", self.plot)):
            if name is not None and not Path(name).absolute().parent.is_dir():
                raise FieldError(flag, name, "a file in a folder that exists")

    @property
    def plot_path(self) -> Path:
        return Path(self.plot) if self.plot else Path(self.output).with_suffix(".png")

    @property
    def partial_path(self) -> Path:
        return Path(self.output + ".partial")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> CalibrateOptions:
        """Raises FieldError naming the flag, its value and what is accepted."""
        given = {f.name: getattr(args, f.name) for f in fields(cls)}
        return cls(**given | {"server_flags": tuple(args.server_flags)})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare every field of CalibrateOptions on `parser`."""
    add = parser.add_argument
    add("--model-path", default=DEFAULT_MODEL, help="model (default: %(default)s)")
    add("--url", help="calibrate this running server instead of starting one")
    add("--api-key", help="key of the server at --url")
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
    add(
        "server_flags",
        nargs="*",
        metavar="-- SERVER FLAGS",
        help="further flags for sglang_taper.launch_server, after `--`",
    )
