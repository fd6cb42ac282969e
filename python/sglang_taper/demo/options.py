"""Flags of `sglang-taper demo`. Imports nothing heavy: every `--help` comes here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from sglang_taper.errors import FieldError
from sglang_taper.protocol import MAX_SLO_MS, check_positive
from sglang_taper.server_options import ServerOptions, add_server_flags

TOPIC = "keeping bees in a city"
# Between what one branch per request needs and what all branches need: on two CPU
# cores the window in which width decides ends at about 1.4.
TPOT_SLO_FACTOR = 1.3
TTFT_SLO_MS = 20_000.0


@dataclass(frozen=True)
class DemoOptions(ServerOptions):
    """What the user asked for; `tpot_slo_ms` None means measured."""

    topic: str = TOPIC
    quick: bool = False
    rounds: int = 1
    seed: int = 0
    tpot_slo_factor: float = TPOT_SLO_FACTOR
    tpot_slo_ms: float | None = None
    ttft_slo_ms: float = TTFT_SLO_MS
    json: str | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise FieldError("--rounds", self.rounds, "at least 1")
        check_positive("--tpot-slo-factor", self.tpot_slo_factor, 1000)
        check_positive("--ttft-slo-ms", self.ttft_slo_ms, MAX_SLO_MS)
        if self.tpot_slo_ms is not None:
            check_positive("--tpot-slo-ms", self.tpot_slo_ms, MAX_SLO_MS)
        super().__post_init__()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare every field of DemoOptions on `parser`."""
    add = parser.add_argument
    add_server_flags(parser, "use")
    add("--topic", default=TOPIC, help="what the program writes about")
    add("--quick", action="store_true", help="a smaller mix; its figures are rough")
    add("--rounds", type=int, default=1, help="times each policy runs, interleaved")
    add("--seed", type=int, default=0, help="seed of the mix (default: 0)")
    add(
        "--tpot-slo-factor",
        type=float,
        default=TPOT_SLO_FACTOR,
        metavar="X",
        help="TPOT SLO as a multiple of what serial requests take under policy off "
        "(default: %(default)s)",
    )
    add("--tpot-slo-ms", type=float, help="TPOT SLO in ms instead of a measured one")
    add(
        "--ttft-slo-ms",
        type=float,
        default=TTFT_SLO_MS,
        help="TTFT SLO in ms (default: %(default)g)",
    )
    add("--json", metavar="FILE", help="also write the facts as JSON")
