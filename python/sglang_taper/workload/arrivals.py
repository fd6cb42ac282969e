"""When requests arrive: drawn, or read from a trace of a real service."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from sglang_taper.errors import FieldError

# Mooncake's published timestamps are rounded to this; undone by a uniform jitter.
MOONCAKE_TICK_MS = 3000.0


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace, the first arriving at 0 ms."""

    arrival_ms: float
    input_tokens: int
    output_tokens: int


class Arrivals(msgspec.Struct, frozen=True):
    """An arrival process, as `--arrivals` names it.

    `closed` keeps `concurrency` requests in flight. The others are open loops: `cv` is
    the coefficient of variation of the gaps (1: Poisson), `trace` a file.
    """

    concurrency: int | None = None
    cv: float = 1.0
    trace: str | None = None

    @property
    def is_closed(self) -> bool:
        return self.concurrency is not None


def parse_arrivals(text: str) -> Arrivals:
    """`poisson`, `gamma:CV`, `trace:FILE` or `closed:C`; raises FieldError."""
    kind, _, value = text.partition(":")
    try:
        if kind == "poisson" and not value:
            return Arrivals()
        if kind == "gamma" and 0 < float(value) <= 100:
            return Arrivals(cv=float(value))
        if kind == "closed" and int(value) >= 1:
            return Arrivals(concurrency=int(value))
    except ValueError:
        pass
    if kind == "trace" and value:
        return Arrivals(trace=value)
    accepted = "poisson, gamma:CV (0 to 100), trace:FILE or closed:C (at least 1)"
    raise FieldError("--arrivals", text, accepted)


def arrival_times_ms(
    arrivals: Arrivals,
    count: int,
    rng: random.Random,
    rate_per_s: float | None = None,
    slowdown: float = 1.0,
) -> list[float]:
    """`count` ascending times, the first at 0 in a trace; all 0 in a closed loop.

    With a trace and a rate, time is scaled so that its first `count` requests have
    that mean rate, which keeps their bursts; else it is stretched by `slowdown`. A
    trace that is too short is refused. A drawn process needs a rate.
    """
    if arrivals.is_closed:
        return [0.0] * count
    if arrivals.trace is not None:
        times = [row.arrival_ms for row in read_trace(arrivals.trace, rng)]
        if len(times) < count:
            accepted = f"a trace of at least {count} requests"
            raise FieldError("--arrivals", arrivals.trace, accepted)
        times, scale = times[:count], slowdown
        if rate_per_s is not None and times[-1] > 0:
            scale *= 1000 * (count - 1) / times[-1] / rate_per_s
        return [scale * at_ms for at_ms in times]
    if rate_per_s is None:
        raise FieldError("--request-rate", rate_per_s, "in requests per second")
    shape, mean_ms = 1 / arrivals.cv**2, 1000 * slowdown / rate_per_s
    gaps = (rng.gammavariate(shape, mean_ms / shape) for _ in range(count))
    return list(accumulate(gaps))


def read_trace(path: str, rng: random.Random) -> list[TraceRow]:
    """The rows of an Azure CSV or Mooncake JSONL file, plain or gzipped, in order.

    Raises FieldError for a file that is neither. Mooncake times get their jitter
    from `rng`.
    """
    try:
        text = _read_text(Path(path))
        is_mooncake = text.lstrip().startswith("{")
        rows = list(_mooncake(text, rng) if is_mooncake else _azure(text))
        rows.sort(key=lambda row: row.arrival_ms)
        first_ms = rows[0].arrival_ms
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        accepted = f"an Azure CSV or Mooncake JSONL file ({error})"
        raise FieldError("--arrivals", path, accepted) from None
    return [
        msgspec.structs.replace(row, arrival_ms=row.arrival_ms - first_ms)
        for row in rows
    ]


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def _azure(text: str) -> Iterator[TraceRow]:
    for row in csv.DictReader(io.StringIO(text)):
        # Seven decimals of a second; Python reads six.
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        at_s = datetime.fromisoformat(whole + "+00:00").timestamp()
        at_ms = 1000 * (at_s + float("0." + (fraction or "0")))
        yield TraceRow(at_ms, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(text: str, rng: random.Random) -> Iterator[TraceRow]:
    for line in text.splitlines():
        row: dict[str, Any] = json.loads(line)
        yield TraceRow(
            row["timestamp"] + rng.uniform(0, MOONCAKE_TICK_MS),
            row["input_length"],
            row["output_length"],
        )
