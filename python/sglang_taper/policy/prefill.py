"""When waiting prefills may start: coalescing, which is not a width policy.

A prefill stops all decoding, and a short one costs nearly as much as several together.
So prefills are held until one of them has waited for its hold, or nothing decodes;
then all of them go. What is spent is slack of the TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

# Values of `PolicyParams.prefill_hold_s` besides a number of seconds.
OFF, AUTO = "off", "auto"
# Share of its TTFT SLO for which `auto` holds a request. In a simulated open loop with
# an SLO of 2 s, holding for an eighth to a quarter of it took every policy from 59-78 %
# to 100 % attainment, and half of it cost goodput.
AUTO_TTFT_SHARE = 0.25


class WaitingPrefill(msgspec.Struct, frozen=True, gc=False):
    """A request that has to be prefilled.

    It has waited since `since_ms`, or has been let go (None) and is held no more.
    `next_due_ms` is when the next token of its request is due; None before the first.
    """

    since_ms: float | None
    ttft_slo_ms: float
    next_due_ms: float | None = None


def hold_ends_ms(hold_s: str | float, prefill: WaitingPrefill) -> float:
    """Until when `prefill` may be held; minus infinity if not at all.

    `auto` spends a share of the TTFT SLO, and of a request that has its first token
    (the next stage of a program) not more than it is ahead of its schedule.
    """
    if prefill.since_ms is None or hold_s == OFF:
        return -math.inf
    if hold_s != AUTO:
        return prefill.since_ms + 1000 * float(hold_s)
    ends_ms = prefill.since_ms + AUTO_TTFT_SHARE * prefill.ttft_slo_ms
    if prefill.next_due_ms is None:
        return ends_ms
    return min(ends_ms, prefill.next_due_ms)


def held_until_ms(
    hold_s: str | float,
    prefills: Iterable[WaitingPrefill],
    now_ms: float,
    is_decoding: bool,
) -> float | None:
    """Until when all of `prefills` are held; None when they may go.

    `is_decoding` is False when nothing decodes, or when a prefill runs anyway: then
    there is nothing to gain by a hold. It ends early when that changes or another
    request comes that cannot wait as long.
    """
    if not is_decoding:
        return None
    until_ms = min((hold_ends_ms(hold_s, p) for p in prefills), default=-math.inf)
    return until_ms if now_ms < until_ms else None
