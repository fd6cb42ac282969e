"""Flags of commands that start a server, or use one that runs. Light."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Self

from sglang_taper.errors import FieldError
from sglang_taper.models import DEFAULT_MODEL


@dataclass(frozen=True)
class ServerOptions:
    """Which server: a new one of `model_path` with `server_flags`, or that at `url`."""

    model_path: str = DEFAULT_MODEL
    url: str | None = None
    api_key: str | None = None
    server_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.url and self.server_flags:
            shown = " ".join(self.server_flags)
            raise FieldError("server flags", shown, "none together with --url")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Raises FieldError naming the flag, its value and what is accepted."""
        given = {f.name: getattr(args, f.name) for f in fields(cls)}
        return cls(**given | {"server_flags": tuple(args.server_flags)})


def add_server_flags(parser: argparse.ArgumentParser, use: str) -> None:
    """Declare every field of ServerOptions; `use` is what is done to the server."""
    add = parser.add_argument
    add("--model-path", default=DEFAULT_MODEL, help="model (default: %(default)s)")
    add("--url", help=f"{use} this running server instead of starting one")
    add("--api-key", help="key of the server at --url")
    add(
        "server_flags",
        nargs="*",
        metavar="-- SERVER FLAGS",
        help="further flags for sglang_taper.launch_server, after `--`",
    )
