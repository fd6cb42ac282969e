"""What is remembered about requests and branches between decode steps.

Mutable, and fed by whoever runs the decode loop (the engine, the simulator); time is
always an argument. `StepBuilder` makes the frozen `StepView` of a step from it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from operator import sub

from sglang_taper.policy.slack import SCHEDULE, deadline_ms
from sglang_taper.policy.types import (
    LatencyCoefficients,
    PolicyParams,
    RequestView,
    StepView,
)


@dataclass(slots=True, eq=False)
class RequestState:
    """Progress of one request against its SLOs. Fields as in `RequestView`.

    `max_tokens` is the most `num_tokens` can become with the branches it has had so
    far. `left_decode_ms` is when its last row left the decode batch; None while it
    has one there, and before its first. `deadline_misses` counts tokens later than
    the deadline in force when they came, a late first token included.
    """

    group: str
    arrival_ms: float
    ttft_slo_ms: float
    tpot_slo_ms: float
    priority: float = 1.0
    first_token_ms: float | None = None
    schedule_origin_ms: float = 0.0
    last_progress_ms: float = 0.0
    num_tokens: int = 0
    max_tokens: int = 0
    deadline_misses: int = 0
    left_decode_ms: float | None = None

    def __post_init__(self) -> None:
        self.schedule_origin_ms = self.last_progress_ms = self.arrival_ms

    def enter_decode(self, now_ms: float) -> None:
        """Its number of rows in the decode batch went from 0 to 1.

        On a re-entry the clock restarts: the time away (prefill of the next stage,
        a tool call, a retraction) is not decode's to make up for.
        """
        if self.left_decode_ms is None:
            return
        if self.first_token_ms is not None:
            away_since_ms = max(self.left_decode_ms, self.first_token_ms)
            self.schedule_origin_ms += max(0.0, now_ms - away_since_ms)
            self.last_progress_ms = max(self.last_progress_ms, now_ms)
        self.left_decode_ms = None

    def leave_decode(self, now_ms: float) -> None:
        """Its number of rows in the decode batch went from 1 to 0."""
        self.left_decode_ms = now_ms

    def record_tokens(
        self, now_ms: float, count: int = 1, deadline: str = SCHEDULE
    ) -> None:
        """`count` tokens (of any of its branches) came out at `now_ms`.

        A step that gives several branches a token is one call. `deadline` is the
        definition in force (slack.py); tokens that come while the request is away
        from decode, other than the first, are not judged.
        """
        if count <= 0:
            return
        if self.first_token_ms is None:
            self.deadline_misses += now_ms > deadline_ms(self, deadline)
            self.first_token_ms = self.schedule_origin_ms = now_ms
        elif self.left_decode_ms is None:
            self.deadline_misses += self._late_tokens(now_ms, count, deadline)
        self.num_tokens += count
        self.last_progress_ms = now_ms

    def _late_tokens(self, now_ms: float, count: int, deadline: str) -> int:
        due_ms = deadline_ms(self, deadline)
        if deadline != SCHEDULE:
            # The first of them restarts the clock for the others.
            return int(now_ms > due_ms)
        tpot_ms = self.tpot_slo_ms
        return sum(now_ms > due_ms + index * tpot_ms for index in range(count))


@dataclass(slots=True, eq=False)
class BranchState:
    """One branch, from its creation (which adds to its request's `max_tokens`) on.

    Its owner counts `output_tokens` up, and sets `last_run_step` to the current step
    when its prefill gives it its first token: so it queues behind the siblings that
    wait already. `request`, `branch` and `max_new_tokens` are fixed.
    """

    request: RequestState
    branch: int
    shared_tokens: int
    max_new_tokens: int
    output_tokens: int = 0
    last_run_step: int = -1
    steps_run: int = 0
    steps_deferred: int = 0

    def __post_init__(self) -> None:
        self.request.max_tokens += self.max_new_tokens

    def end(self) -> None:
        """It produces nothing more; call once. Its unused tokens are given up."""
        self.request.max_tokens -= self.max_new_tokens - self.output_tokens


def record_step(states: Sequence[BranchState], rows: list[int], step: int) -> Set[int]:
    """Decode step `step` ran `rows` of `states` and deferred the others, which are
    returned."""
    for row in rows:
        state = states[row]
        state.last_run_step = step
        state.steps_run += 1
    if len(rows) == len(states):
        return frozenset()
    left_out = set(range(len(states))).difference(rows)
    for row in left_out:
        states[row].steps_deferred += 1
    return left_out


class StepBuilder:
    """Makes the `StepView` of each decode step.

    What depends only on which branches are in the batch is kept until the batch
    changes, so that a step costs tens of microseconds. Views share those lists with
    the builder: nobody may change a view's lists.
    """

    def __init__(self) -> None:
        self._states: list[BranchState] = []
        self._requests: list[RequestState] = []
        self._request_of_row: list[int] = []
        self._branch: list[int] = []
        self._max_new_tokens: list[int] = []

    def build(  # noqa: PLR0913 - one argument per independent fact of a step
        self,
        states: list[BranchState],
        context_tokens: list[int],
        must_run: list[int],
        *,
        now_ms: float,
        step: int,
        params: PolicyParams,
        model: LatencyCoefficients,
        num_waiting_prefill: int = 0,
        stall_share: float = 0.0,
        mean_stall_ms: float = 0.0,
        waiting_ttft_share: float = 0.0,
    ) -> StepView:
        """The view of decode step `step`, about to start at `now_ms`.

        `states` is the decode batch in order; `context_tokens` gives for each row
        its KV tokens; `must_run` is ascending. Requests are in order of first row.
        """
        if states != self._states:
            self._lay_out(states)
        output_tokens = [state.output_tokens for state in states]
        return StepView(
            step=step,
            now_ms=now_ms,
            requests=self._request_views(),
            request_of_row=self._request_of_row,
            branch=self._branch,
            context_tokens=context_tokens,
            shared_tokens=[state.shared_tokens for state in states],
            output_tokens=output_tokens,
            remaining_tokens=list(map(sub, self._max_new_tokens, output_tokens)),
            last_run_step=[state.last_run_step for state in states],
            must_run=must_run,
            params=params,
            model=model,
            num_waiting_prefill=num_waiting_prefill,
            stall_share=stall_share,
            mean_stall_ms=mean_stall_ms,
            waiting_ttft_share=waiting_ttft_share,
        )

    def _lay_out(self, states: list[BranchState]) -> None:
        owners = [state.request for state in states]
        self._requests = list(dict.fromkeys(owners))
        index = dict(zip(self._requests, range(len(owners)), strict=False))
        self._states = list(states)
        self._request_of_row = list(map(index.__getitem__, owners))
        self._branch = [state.branch for state in states]
        self._max_new_tokens = [state.max_new_tokens for state in states]

    def _request_views(self) -> list[RequestView]:
        # Positional, in the order of RequestView: keywords double the cost.
        return [
            RequestView(
                state.group,
                state.arrival_ms,
                state.first_token_ms,
                state.schedule_origin_ms,
                state.last_progress_ms,
                state.num_tokens,
                state.max_tokens - state.num_tokens,
                state.ttft_slo_ms,
                state.tpot_slo_ms,
                state.priority,
            )
            for state in self._requests
        ]
