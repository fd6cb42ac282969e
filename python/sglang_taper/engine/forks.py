"""What happens to forks, and to prefills that are held, before a batch is made.

Around SGLang's own admission: members of a group publish what new branches want,
siblings wait for the one that computes what they share, a fork waits until it fits
as a whole, and branches with nothing left to compute start as decode rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from sglang_taper.engine.adder import ForkPrefillAdder
from sglang_taper.engine.alias import find_donor, needs_prefill, start_rows
from sglang_taper.engine.prefill_hold import PrefillHold
from sglang_taper.engine.prefix import (
    PrefixTree,
    is_publishable,
    may_share_more,
    namespace_of,
    num_common,
)
from sglang_taper.engine.room import ForkRoom
from sglang_taper.engine.sharing import common_prefix
from sglang_taper.policy.forks import Prompt, SharedWork

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler

    from sglang_taper.engine.controller import BranchController

# A sibling waits a pass for another one only when it computes fewer tokens by it than
# the one that every branch may have to run anyway.
MIN_TOKENS_GAINED = 2


class ForkAdmission:
    """One per scheduler. Without a hold, does nothing to requests without a group."""

    def __init__(self, engine: Scheduler, taper: BranchController) -> None:
        pins, counters = taper.pins, taper.counters
        self._engine = engine
        self._prefix = PrefixTree(engine.tree_cache)
        # An embedding model's requests are nobody's branches.
        self._is_on = engine.is_generation and self._prefix.is_shared
        self._pins = pins
        self._counters = counters
        self._room = ForkRoom(engine, self._prefix, pins, counters)
        self._hold = PrefillHold(engine, taper)
        self._running: list[Req] = []
        self._aliased: list[Req] = []
        self._donors: dict[Req, Req] = {}
        self.adder_class = partial(ForkPrefillAdder, self._take)

    @property
    def num_rows_taken(self) -> int:
        """Rows that admitted branches will occupy once this pass is over."""
        return len(self._aliased)

    # -- one pass

    @contextmanager
    def prefill_pass(self, running: ScheduleBatch) -> Iterator[None]:
        """Hide from SGLang's admission what must wait; it is queued again after."""
        self._aliased, self._donors = [], {}
        self._running = running.reqs
        before = self._engine.waiting_queue
        visible = before
        if before and self._may_admit(running):
            visible = self._visible(running)
        hidden = set() if visible is before else set(before) - set(visible)
        self._engine.waiting_queue = visible
        try:
            yield
        finally:
            # Not only if forks were queued before: SGLang queues requests whose
            # grammar is ready within the pass.
            if hidden or self._aliased:
                self._requeue(before, hidden)

    def _may_admit(self, running: ScheduleBatch) -> bool:
        """False where SGLang does not look at the queue at all."""
        engine = self._engine
        is_full = running.batch_is_full and not running.is_empty()
        return not is_full or engine.enable_priority_preemption

    def _has_forks(self, queue: list[Req]) -> bool:
        return self._is_on and any(req.taper.group for req in queue)

    def _requeue(self, before: list[Req], hidden: set[Req]) -> None:
        taken = set(self._aliased)
        left = [r for r in self._engine.waiting_queue if r not in taken]
        if hidden:
            known, stay = set(before), hidden.union(left)
            left = [r for r in before if r in stay] + [
                r for r in left if r not in known
            ]
        self._engine.waiting_queue = left

    def is_stuck(self, plan: NextBatchPlan) -> bool:
        """Whether nothing runs and nothing was admitted although requests wait for
        memory, and a pin could be given up for them (which is done)."""
        engine = self._engine
        progresses = plan.batch_to_run or self._aliased or engine.chunked_req
        if progresses or not plan.running_batch.is_empty():
            return False
        return self._room.is_short() and self._pins.drop_oldest()

    def make_room_to_decode(self, running: ScheduleBatch) -> None:
        """Give up idle pins before SGLang retracts rows for want of KV slots.

        A pin on which no fork is known to come is worth less than any running row;
        the others go only when retracting would not help either.
        """
        if not len(self._pins) or running.is_empty() or running.check_decode_mem():
            return
        while self._pins.drop_oldest_idle(True):
            if running.check_decode_mem():
                return
        owned = [r.kv.kv_allocated_len - r.kv.cache_protected_len for r in running.reqs]
        if sum(owned) - max(owned) < self._engine.page_size:
            while not running.check_decode_mem() and self._pins.drop_oldest():
                pass

    def start(self, running: ScheduleBatch) -> ScheduleBatch:
        """The running batch, with the branches that start without a prefill."""
        if not self._aliased:
            return running
        batch = start_rows(self._engine, self._aliased, self._donors)
        for req in self._aliased:
            req.taper.is_aliased = True
            req.taper.num_copied = req.extend_len
            self._counters.num_copied_tokens += req.extend_len
            req.prefix_len = req.extend_end
        self._counters.num_rows_aliased += len(self._aliased)
        self._aliased, self._donors = [], {}
        if running.is_empty():
            batch.batch_is_full = running.batch_is_full
            return batch
        running.merge_batch(batch)
        return running

    def _take(self, req: Req) -> bool:
        """Whether an admitted request starts as a decode row."""
        req.taper.is_aliased = False
        is_computed, donor = self._is_computed(req, req.prefix_len)
        if not is_computed:
            return False
        if needs_prefill(req):
            self._counters.num_alias_fallbacks += 1
            return False
        if donor is not None:
            self._donors[req] = donor
        self._aliased.append(req)
        return True

    def _is_computed(self, req: Req, num_matched: int) -> tuple[bool, Req | None]:
        """Whether a branch lacks its last token only, and the running one to copy a
        partly filled page from, where one is needed."""
        branch = req.taper
        if branch.group is None or branch.is_prefix_only or num_matched == 0:
            return False, None
        if num_matched == len(req.origin_input_ids) - 1:
            return True, None
        # A donor could be preempted for a request admitted later in this pass.
        if self._engine.enable_priority_preemption:
            return False, None
        donor = find_donor(req, num_matched, self._running, self._engine.page_size)
        return donor is not None, donor

    def _starts_at_once(self, req: Req, prompt: Prompt | None) -> bool:
        """Whether `_take` will take it, should it be admitted."""
        if prompt is None or needs_prefill(req):
            return False
        return self._is_computed(req, prompt.num_matched)[0]

    # -- who may be admitted in this pass

    def _visible(self, running: ScheduleBatch) -> list[Req]:
        queue = self._engine.waiting_queue
        if self._hold.keeps_all(queue, running):
            return []
        prompts: dict[Req, Prompt] = {}
        if self._has_forks(queue):
            queue, prompts = self._visible_forks(running)
        return self._hold.admissible(
            queue, running, lambda req: self._starts_at_once(req, prompts.get(req))
        )

    def _visible_forks(
        self, running: ScheduleBatch
    ) -> tuple[list[Req], dict[Req, Prompt]]:
        """The queue without those who wait for a sibling or for room; the matches."""
        engine = self._engine
        engine.policy.calc_priority(
            engine.waiting_queue,
            running,
            processed_tokens=engine.processed_tokens_counter,
        )
        prompts = self._match_all(running)
        waiting = self._waiting_for_siblings(prompts)
        self._counters.num_siblings_held += len(waiting)
        queue = engine.waiting_queue
        if not engine.enable_priority_preemption:
            # With preemption SGLang makes room for whoever has the priority.
            queue = self._room.admissible(prompts, waiting, running)
        return [req for req in queue if req not in waiting], prompts

    def _match_all(self, running: ScheduleBatch) -> dict[Req, Prompt]:
        prompts = {}
        for req in self._engine.waiting_queue:
            if req.taper.group is not None:
                prompts[req] = self._match(req, running)
        return prompts

    def _match(self, req: Req, running: ScheduleBatch) -> Prompt:
        """The tree's match; first asks the members of the group, once."""
        prompt = self._prefix.match(req)
        if req.taper.is_probed or prompt.num_missing <= 0:
            return prompt
        req.taper.is_probed = True
        for member in running.reqs:
            if self._publishes(member, req, prompt):
                self._prefix.publish(member)
                self._counters.num_checkpoints += 1
                prompt = self._prefix.match(req)
        return prompt

    def _publishes(self, member: Req, req: Req, prompt: Prompt) -> bool:
        """Whether a running member has computed more of `req` than the tree holds."""
        if member.taper.group is not req.taper.group or not is_publishable(member):
            return False
        if namespace_of(member) != prompt.namespace:
            return False
        if not may_share_more(prompt, member):
            return False
        page = self._engine.page_size
        common = min(num_common(prompt.tokens, member), prompt.limit)
        return common // page * page > prompt.num_matched

    def _waiting_for_siblings(self, prompts: dict[Req, Prompt]) -> dict[Req, int]:
        """Branches that wait, each with the tokens it will share by it."""
        work = SharedWork(self._engine.page_size)
        chunked = self._engine.chunked_req
        if chunked is not None and chunked.taper.group is not None:
            work.begin(self._prefix.match(chunked))
        waiting = {}
        for req, prompt in prompts.items():
            first = work.begun_by(prompt)
            common = common_prefix(prompt.tokens, first.tokens) if first else 0
            gain = min(common, prompt.limit) - prompt.num_matched
            if gain >= MIN_TOKENS_GAINED and self._waits(req, prompt, work):
                waiting[req] = common
                # What it waits for is to be published when it is matched again.
                req.taper.is_probed = False
            elif prompt.num_missing > 0 and not req.skip_radix_cache_insert:
                work.begin(prompt)
        return waiting

    def _waits(self, req: Req, prompt: Prompt, work: SharedWork) -> bool:
        if not work.is_partial(prompt):
            return True
        # Only a sibling still running can hand its page on: wait for it once, or
        # branches that end at once would make each other wait one by one.
        first_time = not req.taper.waits_for_page and not needs_prefill(req)
        req.taper.waits_for_page = True
        return first_time
