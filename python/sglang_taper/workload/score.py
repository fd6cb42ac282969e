"""Requests against their SLOs: SGLang's keys, and what they do not tell.

A request is what the client asked for as one thing, with the tokens of all its
branches. Its TPOT is read twice: over all tokens, which falls with width by
construction, and over its critical path, where every deferred step counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from sglang_taper.errors import FieldError

SLO_METRICS = ("ttft", "tpot", "e2el")
PERCENTILES = (50, 90, 95, 99)
# In a closed loop the pool fills in this share of the time until the last request is
# sent; what ends before is not counted.
WARM_UP_SHARE = 0.2


class Outcome(msgspec.Struct, frozen=True):
    """One request that was sent; times in ms on any one clock.

    `ended_ms` is None for a request that failed or timed out: it meets no SLO.
    `is_victim`: it does not fork, and a fork of another was open while it ran.
    `makespans_ms`: fork to join, for each fork. `max_itl_ms`: longest gap between two
    tokens of one row.
    """

    sent_ms: float
    first_token_ms: float | None
    ended_ms: float | None
    num_tokens: int
    num_critical_tokens: int
    is_decomposable: bool
    is_victim: bool = False
    makespans_ms: tuple[float, ...] = ()
    max_itl_ms: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.ended_ms is not None and self.first_token_ms is not None

    @property
    def ttft_ms(self) -> float:
        first_ms = self.first_token_ms
        return math.inf if first_ms is None else first_ms - self.sent_ms

    @property
    def e2el_ms(self) -> float:
        return math.inf if self.ended_ms is None else self.ended_ms - self.sent_ms

    @property
    def tpot_ms(self) -> float:
        """Over all tokens; 0 for a single one, as SGLang counts it."""
        return self._per_token_ms(self.num_tokens)

    @property
    def tpot_critical_ms(self) -> float:
        return self._per_token_ms(self.num_critical_tokens)

    def _per_token_ms(self, num_tokens: int) -> float:
        if self.ended_ms is None or self.first_token_ms is None:
            return math.inf
        return time_per_token(self.ended_ms - self.first_token_ms, num_tokens)

    def meets(self, slos_ms: Mapping[str, float], critical: bool = False) -> bool:
        return all(self.meets_one(name, slos_ms[name], critical) for name in slos_ms)

    def meets_one(self, name: str, slo_ms: float, critical: bool = False) -> bool:
        name = "tpot_critical" if critical and name == "tpot" else name
        observed_ms: float = getattr(self, f"{name}_ms")
        return self.succeeded and observed_ms <= slo_ms


def time_per_token(decode_time: float, num_tokens: int) -> float:
    """TPOT as SGLang counts it: `decode_time` from the first token to the last."""
    return decode_time / (num_tokens - 1) if num_tokens > 1 else 0.0


def parse_slos(pairs: Iterable[str]) -> dict[str, float]:
    """`ttft:MS`, `tpot:MS`, `e2el:MS`, as SGLang's `--goodput`; raises FieldError."""
    slos: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            slos[name] = float(value)
        except ValueError:
            slos[name] = math.nan
        if name not in SLO_METRICS or not slos[name] > 0:
            accepted = "KEY:MS above 0 with KEY in " + ", ".join(SLO_METRICS)
            raise FieldError("--goodput", pair, accepted)
    return slos


def score(
    outcomes: Sequence[Outcome], slos_ms: Mapping[str, float], duration_s: float
) -> dict[str, Any]:
    """What a result says about requests sent in a window of `duration_s`.

    Attainment is over requests sent; failures miss. `token_goodput`: tokens per second
    of requests that met every SLO. Keys ending in `_critical` read TPOT over the
    critical path. `serial_`, `decomposable_` and `victim_`: those requests alone.
    """
    sent = len(outcomes)
    served = [outcome for outcome in outcomes if outcome.succeeded]
    groups = {
        "serial": [o for o in outcomes if not o.is_decomposable],
        "decomposable": [o for o in outcomes if o.is_decomposable],
        "victim": [o for o in outcomes if o.is_victim],
    }
    return {
        "duration": duration_s,
        "sent": sent,
        "completed": len(served),
        "failed": sent - len(served),
        "total_output_tokens": sum(o.num_tokens for o in served),
        "output_throughput": _rate(sum(o.num_tokens for o in served), duration_s),
        "request_throughput": _rate(len(served), duration_s),
        "goodput_slos_ms": dict(slos_ms),
        "slo_attainment_by_metric": {
            name: _share([o.meets_one(name, slo_ms) for o in outcomes])
            for name, slo_ms in slos_ms.items()
        },
        **_attained(outcomes, slos_ms, duration_s, critical=False),
        **_attained(outcomes, slos_ms, duration_s, critical=True),
        **_of_groups(groups, slos_ms),
        **_distributions(served),
    }


def counted_window(
    first_sent_ms: float, last_sent_ms: float, last_end_ms: float, is_closed: bool
) -> tuple[float, float]:
    """From when to when a run is judged, in ms.

    Open loop: from the first arrival to the last end. Closed loop: after warm-up and
    while the last request had not been sent, so that all places were taken; what ended
    outside does not count.
    """
    if not is_closed:
        return first_sent_ms, last_end_ms
    warm_up_ms = WARM_UP_SHARE * (last_sent_ms - first_sent_ms)
    return first_sent_ms + warm_up_ms, last_sent_ms


def mean_time_between_tokens_ms(outcomes: Iterable[Outcome]) -> float:
    """Over all tokens of served requests after the first, prefill stalls included."""
    served = [outcome for outcome in outcomes if outcome.succeeded]
    gaps = sum(outcome.num_tokens - 1 for outcome in served)
    spent_ms = sum(o.tpot_ms * (o.num_tokens - 1) for o in served)
    return spent_ms / gaps if gaps else 0.0


def _attained(
    outcomes: Sequence[Outcome],
    slos_ms: Mapping[str, float],
    duration_s: float,
    critical: bool,
) -> dict[str, float]:
    good = [outcome for outcome in outcomes if outcome.meets(slos_ms, critical)]
    suffix = "_critical" if critical else ""
    return {
        f"request_goodput{suffix}": _rate(len(good), duration_s),
        f"token_goodput{suffix}": _rate(sum(o.num_tokens for o in good), duration_s),
        f"slo_attainment{suffix}": len(good) / len(outcomes) if outcomes else 0.0,
    }


def _of_groups(
    groups: Mapping[str, Sequence[Outcome]], slos_ms: Mapping[str, float]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, members in groups.items():
        served = [outcome for outcome in members if outcome.succeeded]
        found[f"{name}_sent"] = len(members)
        found[f"{name}_slo_attainment"] = _share([o.meets(slos_ms) for o in members])
        found[f"{name}_mean_tpot_ms"] = mean_or_none([o.tpot_ms for o in served])
    return found


def _share(is_met: Sequence[bool]) -> float | None:
    return sum(is_met) / len(is_met) if is_met else None


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _distributions(served: Sequence[Outcome]) -> dict[str, float | None]:
    values = {
        "ttft": [o.ttft_ms for o in served],
        "tpot": [o.tpot_ms for o in served],
        "tpot_critical": [o.tpot_critical_ms for o in served],
        "e2e_latency": [o.e2el_ms for o in served],
        "makespan": [ms for o in served for ms in o.makespans_ms],
        "max_itl": [o.max_itl_ms for o in served],
    }
    found: dict[str, float | None] = {}
    for name, numbers in values.items():
        ordered = sorted(numbers)
        found[f"mean_{name}_ms"] = mean_or_none(ordered)
        for percent in PERCENTILES:
            key = "median" if percent == 50 else f"p{percent}"
            found[f"{key}_{name}_ms"] = percentile(ordered, percent)
    return found


def mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Of ascending values, between the two nearest ones; None without a value."""
    if not ordered:
        return None
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
