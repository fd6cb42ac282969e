"""Requests that have ended, against their SLOs.

A request is good when its TTFT and its TPOT (over all its tokens) are within its
SLOs, as SGLang counts goodput. A grouped request may go on after its last branch has
ended; it counts in the totals once it can not any more, and in the window at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from sglang_taper.engine.counters import Counters
from sglang_taper.engine.report import tpot_ms, ttft_ms
from sglang_taper.policy.state import RequestState

WINDOW_S = 60.0
MAX_IN_WINDOW = 16_384


class Judged(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended: when, with how many tokens, and whether in time."""

    ended_ms: float
    num_tokens: int
    is_good: bool


def judge(state: RequestState, ended_ms: float) -> Judged:
    """`state` has a first token. A single token has no TPOT to miss."""
    first_ms, per_token_ms = ttft_ms(state), tpot_ms(state) or 0.0
    assert first_ms is not None
    good = first_ms <= state.ttft_slo_ms and per_token_ms <= state.tpot_slo_ms
    return Judged(ended_ms, state.num_tokens, good)


class Attainment:
    """Totals since start, into `counters`, and what ended within the last `WINDOW_S`.

    `ttl_ms`: for how long a request without a living branch may still go on.
    """

    def __init__(self, counters: Counters, ttl_ms: float) -> None:
        self._counters = counters
        self._ttl_ms = ttl_ms
        # In order of their last end.
        self._idle: dict[RequestState, float] = {}
        self._judged: deque[Judged] = deque(maxlen=MAX_IN_WINDOW)

    def ended(self, state: RequestState, now_ms: float, may_go_on: bool) -> None:
        """Its last branch has ended. One that never got a token does not count."""
        if state.first_token_ms is None:
            return
        if may_go_on:
            self._idle[state] = now_ms
        else:
            self._count(judge(state, now_ms))
        self.settle(now_ms)

    def resumed(self, state: RequestState) -> None:
        """It has a living branch again, or for the first time."""
        self._idle.pop(state, None)

    def settle(self, now_ms: float) -> None:
        """Count those that can not go on any more."""
        while self._idle:
            state, ended_ms = next(iter(self._idle.items()))
            if now_ms - ended_ms <= self._ttl_ms:
                return
            del self._idle[state]
            self._count(judge(state, ended_ms))

    def _count(self, judged: Judged) -> None:
        counters = self._counters
        counters.num_requests_ended += 1
        counters.num_requests_in_slo += judged.is_good
        counters.num_tokens_ended += judged.num_tokens
        counters.num_tokens_in_slo += judged.num_tokens * judged.is_good
        self._judged.append(judged)

    def in_window(self, now_ms: float) -> dict[str, Any]:
        """JSON-safe; rates are per second of the window. Looks at all of it."""
        since_ms = now_ms - 1000 * WINDOW_S
        idle = [judge(state, ended_ms) for state, ended_ms in self._idle.items()]
        recent = [j for j in (*self._judged, *idle) if j.ended_ms > since_ms]
        good = [j for j in recent if j.is_good]
        return {
            "window_s": WINDOW_S,
            "num_requests_ended": len(recent),
            "num_requests_in_slo": len(good),
            "slo_attainment": len(good) / len(recent) if recent else None,
            "request_goodput": len(good) / WINDOW_S,
            "token_goodput": sum(j.num_tokens for j in good) / WINDOW_S,
        }
