"""When a request's next token is due, and how much time a step has left.

Deadlines belong to the request, never to a branch: measured at the slowest branch,
the policy's own deferring would make the request late and hold every later step at
S0. Two definitions, chosen by `PolicyParams.deadline`:

* `progress`: last progress + TPOT, as in TAPER section 3.
* `schedule`: first token + k x TPOT after k tokens, so a request that runs ahead
  keeps what it gained.

Before its first token a request is due at arrival + TTFT in both.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from sglang_taper.policy.types import RequestView, StepView

SCHEDULE, PROGRESS = "schedule", "progress"
# A mean TPOT just above its target is a miss, and what pushes a request over it is a
# prefill at the wrong moment. So after 50 tokens a request keeps the length of a mean
# prefill in hand, before that a part of it, but never many tokens.
RESERVE_STALLS, RESERVE_STALLS_PER_TOKEN = 1.0, 0.02
MAX_RESERVE_TOKENS = 4.0


class Progress(Protocol):
    """What a deadline depends on; `RequestView` and `RequestState` both have it."""

    @property
    def arrival_ms(self) -> float: ...
    @property
    def first_token_ms(self) -> float | None: ...
    @property
    def schedule_origin_ms(self) -> float: ...
    @property
    def last_progress_ms(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def ttft_slo_ms(self) -> float: ...
    @property
    def tpot_slo_ms(self) -> float: ...


def deadline_ms(request: Progress, definition: str) -> float:
    """When the next token of `request` is due, on the step clock."""
    if request.first_token_ms is None:
        return request.arrival_ms + request.ttft_slo_ms
    if definition == SCHEDULE:
        return request.schedule_origin_ms + request.num_tokens * request.tpot_slo_ms
    return request.last_progress_ms + request.tpot_slo_ms


def is_ttft_missed(request: Progress, now_ms: float) -> bool:
    """Whether the first token came, or can only come, after arrival + TTFT SLO."""
    first_ms = now_ms if request.first_token_ms is None else request.first_token_ms
    return first_ms > request.arrival_ms + request.ttft_slo_ms


def is_recoverable(request: RequestView, slack_ms: float, baseline_ms: float) -> bool:
    """Whether a request that is late can be on schedule again before it ends.

    Each S0 step of `baseline_ms` wins TPOT - `baseline_ms` back, and there are at most
    `remaining_tokens` of them. Stalls do not count: right after the prefills of a
    large fork they take most of the time, which says nothing about what is to come, and
    a request given up then is late for good.
    """
    gain_ms = request.tpot_slo_ms - baseline_ms
    return gain_ms > 0 and -slack_ms <= gain_ms * request.remaining_tokens


def reported_slack_ms(slack_ms: float, tpot_slo_ms: float) -> float:
    """`slack_ms` with its negative side bent so that it never falls below -2 TPOT.

    Identity down to -TPOT, then -TPOT * (2 - TPOT / |slack|): continuous with a
    continuous slope, and order is preserved. It keeps one request that is minutes
    late from flattening a plot; no decision depends on it, as every negative slack
    leaves the same budget.
    """
    if slack_ms >= -tpot_slo_ms:
        return slack_ms
    return -tpot_slo_ms * (2 + tpot_slo_ms / slack_ms)


class Slack(NamedTuple):
    """The most urgent of the requests worth protecting: its slack (as
    `reported_slack_ms`), what of it is kept in reserve, and its TPOT SLO."""

    slack_ms: float
    reserve_ms: float
    tpot_slo_ms: float


def step_slack(view: StepView, baseline_ms: float) -> Slack | None:
    """How much time the step has until the most urgent deadline worth keeping.

    With `schedule` deadlines each request keeps a reserve for the next prefill, and
    the most urgent is the one with the least slack beyond that.

    `baseline_ms` is the predicted S0. A request is not protected, because holding
    the others at S0 would cost them and not save it, when

    * its TTFT is missed already;
    * `schedule`: it is late and even S0 alone could not bring it back in time;
    * `progress`: S0, stretched by the share of time prefills take, exceeds its TPOT.

    None when no request is protected: then nothing limits the step.
    """
    cumulative = view.params.deadline == SCHEDULE
    most_ms = RESERVE_STALLS * view.mean_stall_ms
    token_ms = RESERVE_STALLS_PER_TOKEN * view.mean_stall_ms
    worst_ms, worst_reserve_ms, worst_tpot_ms = math.inf, 0.0, 0.0
    for request in view.requests:
        tpot_ms, first_ms = request.tpot_slo_ms, request.first_token_ms
        reserve_ms = 0.0
        ttft_due_ms = request.arrival_ms + request.ttft_slo_ms
        if first_ms is None:
            slack_ms = ttft_due_ms - view.now_ms
            protected = slack_ms >= 0
        elif first_ms > ttft_due_ms:
            continue
        elif cumulative:
            due_ms = request.schedule_origin_ms + request.num_tokens * tpot_ms
            slack_ms = due_ms - view.now_ms
            protected = slack_ms >= 0 or is_recoverable(request, slack_ms, baseline_ms)
            if token_ms:
                saved_ms = min(request.num_tokens * token_ms, most_ms)
                reserve_ms = min(saved_ms, MAX_RESERVE_TOKENS * tpot_ms)
        else:
            slack_ms = request.last_progress_ms + tpot_ms - view.now_ms
            protected = tpot_ms >= _with_stalls(baseline_ms, view.stall_share)
        if protected and slack_ms - reserve_ms < worst_ms - worst_reserve_ms:
            worst_ms, worst_reserve_ms, worst_tpot_ms = slack_ms, reserve_ms, tpot_ms
    if worst_ms == math.inf:
        return None
    reported_ms = reported_slack_ms(worst_ms, worst_tpot_ms)
    return Slack(reported_ms, worst_reserve_ms, worst_tpot_ms)


def most_urgent(view: StepView) -> tuple[RequestView, float]:
    """The request whose next token is due first, and its slack in ms.

    Those that are late already count only when all are.
    """
    definition = view.params.deadline
    slacks = [deadline_ms(r, definition) - view.now_ms for r in view.requests]
    in_time = [i for i, slack_ms in enumerate(slacks) if slack_ms >= 0]
    first = min(in_time or range(len(slacks)), key=slacks.__getitem__)
    return view.requests[first], slacks[first]


def published_slack(view: StepView) -> float:
    """Smallest slack of all requests, lost ones included (TAPER section 3)."""
    definition = view.params.deadline
    return min(deadline_ms(r, definition) for r in view.requests) - view.now_ms


def _with_stalls(step_ms: float, stall_share: float) -> float:
    """Mean time between two steps of `step_ms` when prefills take `stall_share`."""
    return step_ms / (1 - stall_share) if stall_share < 1 else math.inf
