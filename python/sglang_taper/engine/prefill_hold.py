"""Prefills held back until several can run as one: the rule of `policy.prefill`
applied to SGLang's queue.

Time is the step clock's, and a request waits from the first pass that sees it, so all
tensor-parallel ranks let it go in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_taper.policy.prefill import OFF, WaitingPrefill, held_until_ms
from sglang_taper.policy.slack import deadline_ms

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_taper.engine.controller import BranchController
    from sglang_taper.policy.types import PolicyParams

    Situation = tuple[PolicyParams, int, list[Req]]


class PrefillHold:
    """One per scheduler. A request is held once: what waits beside the first that is
    let go goes with it, now or when there is room."""

    def __init__(self, engine: Scheduler, taper: BranchController) -> None:
        self._engine = engine
        self._taper = taper
        self._held: dict[Req, float] = {}
        # What the last look found held as a whole, and until when.
        self._until_ms = -math.inf
        self._seen: Situation | None = None

    def keeps_all(self, queue: list[Req], running: ScheduleBatch) -> bool:
        """Whether nothing has changed since all of `queue` was found to be held."""
        if not self._held or self._taper.clock.now_ms >= self._until_ms:
            return False
        return self._situation(queue, running) == self._seen

    def _situation(self, queue: list[Req], running: ScheduleBatch) -> Situation:
        rows = len(running.reqs) if self._engine.chunked_req is None else 0
        return self._taper.params, rows, list(queue)

    def admissible(
        self,
        queue: list[Req],
        running: ScheduleBatch,
        starts_at_once: Callable[[Req], bool],
    ) -> list[Req]:
        """`queue` without the requests that are held.

        `starts_at_once` says which need no prefill: they are never held, nor do they
        make others go.
        """
        hold_s = self._taper.params.prefill_hold_s
        if hold_s == OFF or not self._engine.is_generation:
            self._now_held([])
            return queue
        prefills = [req for req in queue if not starts_at_once(req)]
        if not prefills:
            return queue
        is_decoding = not running.is_empty() and self._engine.chunked_req is None
        waiting, now_ms = map(self._waiting, prefills), self._taper.clock.now_ms
        until_ms = held_until_ms(hold_s, waiting, now_ms, is_decoding)
        if until_ms is None:
            for req in self._engine.waiting_queue:
                req.taper.is_let_go = True
            self._now_held([])
            return queue
        self._now_held(prefills)
        is_whole = len(prefills) == len(queue)
        self._until_ms = until_ms if is_whole else -math.inf
        self._seen = self._situation(self._engine.waiting_queue, running)
        return [req for req in queue if req not in self._held]

    def _waiting(self, req: Req) -> WaitingPrefill:
        branch, request = req.taper, req.taper.state.request
        if branch.seen_ms is None:
            branch.seen_ms = self._taper.clock.now_ms
        # A retracted row is decode's business.
        is_free = branch.is_let_go or len(req.output_ids) > 0
        due_ms = None
        if request.first_token_ms is not None:
            due_ms = deadline_ms(request, self._taper.params.deadline)
        since_ms = None if is_free else branch.seen_ms
        return WaitingPrefill(since_ms, request.ttft_slo_ms, due_ms)

    def _now_held(self, reqs: list[Req]) -> None:
        """Count those that are held from now on, and the time of those no longer."""
        if not reqs and not self._held:
            return
        now_ms, counters = self._taper.clock.now_ms, self._taper.counters
        before, self._held = self._held, {}
        for req in reqs:
            counters.num_prefills_held += req not in before
            self._held[req] = before.pop(req, now_ms)
        for req, since_ms in before.items():
            if not req.taper.ended:
                req.taper.prefill_held_ms += now_ms - since_ms
                counters.sum_prefill_held_ms += now_ms - since_ms
