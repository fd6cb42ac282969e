"""A fork is admitted whole, or waits whole: what it needs against what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_taper.engine.counters import Counters
from sglang_taper.engine.groups import Group
from sglang_taper.engine.pins import PinTable
from sglang_taper.engine.prefix import PrefixTree
from sglang_taper.policy.forks import Prompt, Room, Unit, num_units_to_try

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


class ForkRoom:
    """Asks the pure rule (`policy.forks.num_units_to_try`) about the queue of `engine`.

    Side effect of asking: pins on which no fork is known to come are given up for a
    fork that would have to wait.
    """

    def __init__(
        self,
        engine: Scheduler,
        prefix: PrefixTree,
        pins: PinTable,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._prefix = prefix
        self._pins = pins
        self._counters = counters

    def admissible(
        self,
        prompts: dict[Req, Prompt],
        waiting: dict[Req, int],
        running: ScheduleBatch,
    ) -> list[Req]:
        """The queue up to the first fork that waits for room; `prompts` are of its
        branches, `waiting` those that wait for a sibling and what they will share."""
        members = self._units()
        units = [self._unit(reqs, prompts, waiting) for reqs in members]
        busy = not running.is_empty() or self._engine.chunked_req is not None
        room = self._room(running, members, prompts)
        number = num_units_to_try(units, room, busy)
        while number < len(units) and self._pins.drop_oldest_idle(True):
            room = self._room(running, members, prompts)
            number = num_units_to_try(units, room, busy)
        self._counters.num_groups_held += number < len(units)
        if number == 0 and units and not running.is_empty():
            # As SGLang notes it: nobody looks at the queue until a row has ended.
            running.batch_is_full = True
        tried = {req for reqs in members[:number] for req in reqs}
        return [req for req in self._engine.waiting_queue if req in tried]

    def is_short(self) -> bool:
        """Whether some waiting request may need more than what is free or evictable."""
        engine = self._engine
        free = engine.token_to_kv_pool_allocator.available_size()
        free += self._prefix.tree.evictable_size()
        return any(self._need(req) >= free for req in engine.waiting_queue)

    def _need(self, req: Req) -> int:
        """Slots of `req` when nothing of it is in the tree."""
        return _length(req) + _tokens_left(req) + int(self._engine.page_size)

    def _units(self) -> list[list[Req]]:
        by_group: dict[Group | Req, list[Req]] = {}
        for req in self._engine.waiting_queue:
            by_group.setdefault(req.taper.group or req, []).append(req)
        return list(by_group.values())

    def _unit(
        self, reqs: list[Req], prompts: dict[Req, Prompt], waiting: dict[Req, int]
    ) -> Unit:
        needs, shared = [], 0
        for req in reqs:
            prompt = prompts.get(req)
            matched = prompt.num_matched if prompt else 0
            shared = max(shared, matched)
            # A waiting sibling finds what the first one computes.
            found = max(matched, waiting.get(req, 0))
            new = _length(req) - found + self._expected_tokens(req)
            needs.append(int(new) + self._engine.page_size)
        return Unit(len(reqs), sum(needs), sum(needs) + shared)

    def _room(
        self,
        running: ScheduleBatch,
        members: list[list[Req]],
        prompts: dict[Req, Prompt],
    ) -> Room:
        engine = self._engine
        first = next(prompts[r] for reqs in members for r in reqs if r in prompts)
        promised = sum(map(self._expected_tokens, running.reqs))
        evictable = self._prefix.num_evictable_beside(first.node)
        free = engine.token_to_kv_pool_allocator.available_size() + evictable
        return Room(
            free_tokens=int(free - promised),
            free_rows=engine.get_num_allocatable_reqs(
                len(running.reqs), running_batch=running
            ),
            pool_tokens=engine.max_total_num_tokens,
            pool_rows=engine.max_running_requests,
        )

    def _expected_tokens(self, req: Req) -> float:
        """Tokens `req` may still generate, as SGLang counts a running request."""
        certain = req.sampling_params.ignore_eos
        ratio = 1.0 if certain else self._engine.new_token_ratio_tracker.current
        return float(_tokens_left(req) * ratio)


def _length(req: Req) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def _tokens_left(req: Req) -> int:
    """Tokens `req` may still generate at most, clipped as SGLang's admission does."""
    left = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    return int(min(left, CLIP_MAX_NEW_TOKENS))
