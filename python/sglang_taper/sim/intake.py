"""The queue in front of the decode batch: arrivals, places, prefills.

Prefill takes admitted requests in order, in chunks. A new request is admitted when a
place is free and its prompt and all its tokens fit into the KV pool; nothing is ever
retracted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sglang_taper.policy.prefill import OFF, WaitingPrefill, held_until_ms
from sglang_taper.policy.slack import deadline_ms
from sglang_taper.policy.state import RequestState
from sglang_taper.policy.types import PolicyParams
from sglang_taper.sim.machine import Machine
from sglang_taper.sim.programs import RunningPath, RunningRequest
from sglang_taper.workload.requests import PlannedRequest

JOINS = ("kv", "tree", "text")


class EngineOptions(msgspec.Struct, frozen=True):
    """How the engine around the policy is set up.

    `max_requests`: requests with a place, however wide. `max_rows`: branches with a
    place, deferred ones too, as a server's `--max-running-requests` counts; then forks
    and joins queue like new requests, and a fork is admitted whole. `joins`: what a
    join computes again, nothing (`kv`: branches are concatenated in the KV pool), all
    but the first branch (`tree`: what our server finds in its radix tree), or all
    branches (`text`: a client on a stock server). `sees_stalls` False: the policy is
    told that prefills take no time. `late_results`: that something has ended is known
    a step later, as with SGLang's overlap scheduling, forks and joins only where they
    queue. Prefills are held as `PolicyParams` says.
    """

    max_requests: float = math.inf
    max_rows: float = math.inf
    joins: str = "kv"
    sees_stalls: bool = True
    late_results: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """A new request, or (`path`) one that goes on: after a join, or with a fork.

    `num_tokens` to prefill, of which `tokens_left` are not yet; `num_rows` it will
    take; `since_ms` it waits.
    """

    request: RunningRequest
    num_tokens: int
    since_ms: float
    path: RunningPath | None = None
    num_rows: int = 1
    tokens_left: int = 0
    is_let_go: bool = False

    def __post_init__(self) -> None:
        self.tokens_left = self.num_tokens


class Intake:
    """Requests from their arrival to the end of their prefill."""

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        params: PolicyParams,
        machine: Machine,
        options: EngineOptions,
        concurrency: int | None,
    ) -> None:
        self.params, self.machine, self.options = params, machine, options
        self.is_closed = concurrency is not None
        self.sent: list[RunningRequest] = []
        self.resident: list[RunningRequest] = []
        self.waiting: deque[Entry] = deque()
        self.prefilling: deque[Entry] = deque()
        self.ready: list[Entry] = []
        self._to_come = deque(requests)
        self._num_idle_clients = concurrency or 0
        self._kv_tokens = 0

    @property
    def next_arrival_ms(self) -> float | None:
        """When the next request comes, if it does not wait for a client."""
        return self._to_come[0].arrival_ms if self._to_come else None

    def arrive(self, now_ms: float) -> None:
        """Queue all requests that have arrived by `now_ms`."""
        while self._to_come:
            is_due = self._num_idle_clients > 0
            if not self.is_closed:
                is_due = self._to_come[0].arrival_ms <= now_ms
            if not is_due:
                return
            planned = self._to_come.popleft()
            self._num_idle_clients -= self.is_closed
            arrival_ms = now_ms if self.is_closed else planned.arrival_ms
            state = RequestState(
                str(len(self.sent)),
                arrival_ms,
                self.params.ttft_slo_ms,
                self.params.tpot_slo_ms,
            )
            request = RunningRequest(planned, state, arrival_ms)
            self.sent.append(request)
            prompt_tokens = planned.shape.prompt_tokens
            self.waiting.append(Entry(request, prompt_tokens, arrival_ms))

    def go_on(self, entry: Entry) -> None:
        """A request that has its place, but where rows are counted must queue again."""
        if self.options.max_rows < math.inf:
            self.waiting.append(entry)
        else:
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        """It has its place: to the prefill queue, or to those that need none."""
        if entry.num_tokens:
            self.prefilling.append(entry)
        else:
            self.ready.append(entry)

    def admit(self, num_rows: int) -> None:
        """Give places to what fits; `num_rows` are in the decode batch."""
        while (entry := self._next_with_place()) is not None:
            started = (*self.prefilling, *self.ready)
            taken = num_rows + sum(other.num_rows for other in started)
            if taken and taken + entry.num_rows > self.options.max_rows:
                return
            if entry.path is None:
                self._kv_tokens += entry.request.num_kv_tokens
                self.resident.append(entry.request)
            self.waiting.remove(entry)
            self._start(entry)

    def _next_with_place(self) -> Entry | None:
        """The first that waits for rows only; a new request needs a place first, and
        does not overtake another."""
        seen_new = False
        for entry in self.waiting:
            if entry.path is not None:
                return entry
            if not seen_new and self._has_place(entry):
                return entry
            seen_new = True
        return None

    def waiting_ttft_share(self, now_ms: float) -> float:
        """As `StepView` has it. The queue is in order of arrival."""
        waits = (now_ms - e.since_ms for e in self.waiting if e.path is None)
        return next(waits, 0.0) / self.params.ttft_slo_ms

    def _has_place(self, entry: Entry) -> bool:
        if len(self.resident) >= self.options.max_requests:
            return False
        tokens = self._kv_tokens + entry.request.num_kv_tokens
        return tokens <= self.machine.max_kv_tokens or not self.resident

    def retire(self, request: RunningRequest) -> None:
        """It has ended: its place and its client are free."""
        self.resident.remove(request)
        self._kv_tokens -= request.num_kv_tokens
        self._num_idle_clients += self.is_closed

    def may_prefill(self, now_ms: float, is_decoding: bool) -> bool:
        """Whether there is something to prefill and it is not held."""
        hold_s = self.params.prefill_hold_s
        if not self.prefilling or hold_s == OFF:
            return bool(self.prefilling)
        waiting = map(self._waiting_prefill, self.prefilling)
        if held_until_ms(hold_s, waiting, now_ms, is_decoding) is not None:
            return False
        for entry in self.prefilling:
            entry.is_let_go = True
        return True

    def _waiting_prefill(self, entry: Entry) -> WaitingPrefill:
        state = entry.request.state
        has_token = state.first_token_ms is not None
        return WaitingPrefill(
            None if entry.is_let_go else entry.since_ms,
            state.ttft_slo_ms,
            deadline_ms(state, self.params.deadline) if has_token else None,
        )

    def take_chunk(self) -> tuple[int, list[Entry]]:
        """The tokens of the next prefill step, and the entries it completes."""
        room, done = self.machine.chunk_tokens, []
        for entry in self.prefilling:
            taken = min(room, entry.tokens_left)
            entry.tokens_left -= taken
            room -= taken
            if entry.tokens_left == 0:
                done.append(entry)
            if room == 0:
                break
        for _ in done:
            self.prefilling.popleft()
        return self.machine.chunk_tokens - room, done
