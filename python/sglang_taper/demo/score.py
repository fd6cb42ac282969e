"""Requests against their SLOs, as the client saw them.

A forking request is one request. Its TPOT is read twice: over all its tokens, which
deferring hardly touches, and over its critical path, where every deferred step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from sglang_taper.workload.score import time_per_token


@dataclass(frozen=True)
class BranchSteps:
    """Decode steps of one branch: those it ran in and those it was left out of."""

    run: int
    deferred: int


@dataclass(frozen=True)
class RequestRecord:
    """One request: when its tokens came (seconds on any one clock) and how many."""

    name: str
    is_forked: bool
    sent_s: float
    first_token_s: float
    last_token_s: float
    num_tokens: int
    num_critical_tokens: int
    branches: tuple[BranchSteps, ...] = ()

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first_token_s - self.sent_s)

    @property
    def tpot_ms(self) -> float:
        """Over all tokens (SGLang's definition; 0 for a single token)."""
        return self._per_token_ms(self.num_tokens)

    @property
    def tpot_critical_ms(self) -> float:
        """Over the tokens of the longest way through the request."""
        return self._per_token_ms(self.num_critical_tokens)

    def _per_token_ms(self, num_tokens: int) -> float:
        decode_ms = 1000 * (self.last_token_s - self.first_token_s)
        return time_per_token(decode_ms, num_tokens)


# The server sees a token before the client does, and meeting an SLO is a cliff: it is
# told a slightly tighter one than requests are scored against.
PLANNED_SHARE = 0.95


@dataclass(frozen=True)
class Slo:
    """Targets that every request is scored against, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    @property
    def planned_tpot_ms(self) -> float:
        """The TPOT target the server plans with."""
        return PLANNED_SHARE * self.tpot_ms

    def is_met(self, record: RequestRecord) -> bool:
        return record.ttft_ms <= self.ttft_ms and record.tpot_ms <= self.tpot_ms

    def is_met_critical(self, record: RequestRecord) -> bool:
        met_tpot = record.tpot_critical_ms <= self.tpot_ms
        return record.ttft_ms <= self.ttft_ms and met_tpot


def describe_slo(slo: Slo) -> dict[str, float]:
    """The targets as JSON."""
    return asdict(slo) | {"planned_tpot_ms": slo.planned_tpot_ms}


def score(
    records: Sequence[RequestRecord], slo: Slo, duration_s: float
) -> dict[str, Any]:
    """Attainment and goodput of `records`, sent and answered within `duration_s`.

    The keys are SGLang's where it has them. `duration_s` is the sum over rounds.
    """
    good = [r for r in records if slo.is_met(r)]
    serial = [r for r in records if not r.is_forked]
    forked = [r for r in records if r.is_forked]
    return {
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_good": len(good),
        "num_serial": len(serial),
        "num_serial_good": sum(map(slo.is_met, serial)),
        "slo_attainment": _share(len(good), len(records)),
        "slo_attainment_critical": _share(
            sum(map(slo.is_met_critical, records)), len(records)
        ),
        "request_goodput": len(good) / duration_s,
        "token_goodput": sum(r.num_tokens for r in good) / duration_s,
        "output_throughput": sum(r.num_tokens for r in records) / duration_s,
        "ttft_ms": _mean_and_max(r.ttft_ms for r in records),
        "serial_tpot_ms": _mean_and_max(r.tpot_ms for r in serial),
        "forked_tpot_ms": _mean_and_max(r.tpot_ms for r in forked),
        "forked_tpot_critical_ms": _mean_and_max(r.tpot_critical_ms for r in forked),
        "mean_width": mean_width(r.branches for r in forked),
    }


def describe(record: RequestRecord, slo: Slo) -> dict[str, Any]:
    """One request as JSON."""
    return {
        "name": record.name,
        "is_forked": record.is_forked,
        "ttft_ms": record.ttft_ms,
        "tpot": record.tpot_ms,
        "tpot_critical": record.tpot_critical_ms,
        "num_tokens": record.num_tokens,
        "num_critical_tokens": record.num_critical_tokens,
        "is_good": slo.is_met(record),
        "branches": [asdict(branch) for branch in record.branches],
    }


def mean_width(groups: Iterable[Sequence[BranchSteps]]) -> float | None:
    """Mean branches per step over the steps in which a group had several alive.

    Siblings start together. The last of them runs alone, and in every step, once the
    others have ended; that stretch is left out. None without any such step.
    """
    rows = steps = 0
    for branches in groups:
        ages = sorted(b.run + b.deferred for b in branches)
        if len(ages) > 1:
            steps += ages[-2]
            rows += sum(b.run for b in branches) - (ages[-1] - ages[-2])
    return rows / steps if steps else None


def mean_serial_tpot_ms(records: Iterable[RequestRecord]) -> float:
    """The yardstick of the TPOT SLO."""
    return fmean(r.tpot_ms for r in records if not r.is_forked)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean_and_max(values: Iterable[float]) -> dict[str, float] | None:
    listed = list(values)
    return {"mean": fmean(listed), "max": max(listed)} if listed else None
