"""Random forks, joins, aborts, retractions and flushes against SGLang's real memory.

The scheduler is ours and SGLang's own, without a server and without a model: see
fork_engine.py. After every event all KV of all rows is compared with the truth.
"""

from __future__ import annotations

from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest
from fork_checks import Checker
from fork_engine import ForkEngine
from fork_parts import TTL_S, Shape, engine_settings
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.managers import scheduler as sglang_scheduler

from sglang_taper.engine.attention.counting import AttentionCounters
from sglang_taper.protocol import BranchMeta

# of a backend that knows all slots at once, and one that waits for them
Reads = tuple[AttentionCounters, AttentionCounters]
MAX_TOKENS = 150
MAX_WAITING = 24
# Prompts that share beginnings, within pages and over several.
_BASE = [Random(7).randrange(11) for _ in range(96)]
PROMPTS = (_BASE[:5], _BASE[:21], _BASE[:48], _BASE[:96], [1, *_BASE[:40]])

picks = st.integers(0, 40)
prompts = st.builds(
    list.__add__,
    st.sampled_from(PROMPTS),
    st.lists(st.integers(0, 10), max_size=20),
)
salts = st.sampled_from((None, None, "s"))
short = st.lists(st.integers(0, 10), max_size=3)
lengths = st.integers(1, 40)
pauses = st.integers(0, 4)
seeds = st.one_of(st.none(), st.integers(1, 3))


class ForkMachine(RuleBasedStateMachine):
    """The client side of it: remembers what it sent, and forks, joins and aborts."""

    def __init__(self, shape: Shape, reads: list[Reads]) -> None:
        super().__init__()
        self.reads = reads
        self.engine = ForkEngine(shape)
        self.checker = Checker(self.engine)
        self.reqs: list[Any] = []
        self.unsent: list[tuple[Any, ...]] = []
        self.num_groups = self.num_sent = self.num_forks = 0

    # -- what is sent

    @property
    def has_room(self) -> bool:
        return len(self.engine.waiting_queue) < MAX_WAITING

    @property
    def grouped(self) -> list[Any]:
        return [req for req in self.reqs if req.taper.group is not None]

    def send(
        self,
        tokens: list[int],
        meta: BranchMeta,
        max_new: int,
        seed: int | None = None,
        salt: str | None = None,
    ) -> Any:
        self.num_sent += 1
        req = self.engine.send(
            f"r{self.num_sent}",
            tokens[-MAX_TOKENS:],
            max_new,
            meta.to_wire(),
            seed=seed,
            salt=salt,
        )
        self.reqs.append(req)
        return req

    @precondition(lambda self: self.has_room)
    @rule(prompt=prompts, max_new=lengths, seed=seeds, salt=salts, pause=pauses)
    def open_request(
        self,
        prompt: list[int],
        max_new: int,
        seed: int | None,
        salt: str | None,
        pause: int,
    ) -> None:
        self.num_groups += 1
        meta = BranchMeta(group=f"g{self.num_groups}")
        self.send(prompt, meta, max_new, seed, salt)
        self.run(pause)

    @precondition(lambda self: self.has_room)
    @rule(prompt=prompts, max_new=lengths, salt=salts)
    def send_plain_request(
        self, prompt: list[int], max_new: int, salt: str | None
    ) -> None:
        self.send(prompt, BranchMeta(), max_new, None, salt)

    def children(self, parent: Any, width: int, is_named: bool) -> list[BranchMeta]:
        self.num_forks += 1
        meta = parent.taper.meta
        return [
            BranchMeta(
                group=meta.group,
                branch=index,
                width=width,
                depth=meta.depth + 1,
                stage=self.num_forks,
                parent=parent.rid if is_named else None,
            )
            for index in range(width)
        ]

    @precondition(lambda self: self.grouped and self.has_room)
    @rule(
        parent=picks,
        is_decoding=st.booleans(),
        width=st.sampled_from((1, 2, 3, 4, 6, 16)),
        at_once=st.integers(0, 16),
        cut=st.sampled_from((0, 0, 1, 5)),
        suffix=short,
        own=st.booleans(),
        max_new=lengths,
        seed=seeds,
        is_named=st.booleans(),
        is_elsewhere=st.integers(0, 9).map(lambda number: number == 9),
        pause=pauses,
    )
    def fork(
        self, parent: int, is_decoding: bool, width: int, at_once: int, **what: Any
    ) -> None:
        """Of a parent that waits, prefills, decodes or has ended; the siblings that
        are not sent at once come later."""
        decoding = [r for r in self.engine.running_batch.reqs if r in self.grouped]
        candidates = (is_decoding and decoding) or self.grouped
        req = candidates[-1 - parent % len(candidates)]
        known = [*req.origin_input_ids, *req.output_ids]
        text = (known[: len(known) - what["cut"]] or known) + what["suffix"]
        for meta in self.children(req, width, what["is_named"]):
            tokens = [*text, meta.branch] if what["own"] else text
            seed = what["seed"] and what["seed"] + meta.branch
            salt = "s" if what["is_elsewhere"] else req.cache_salt
            self.unsent.append((tokens, meta, what["max_new"], seed, salt))
        for _ in range(min(at_once, width)):
            self.send(*self.unsent.pop(-1))
        self.run(what["pause"])

    @precondition(lambda self: self.unsent and self.has_room)
    @rule(which=picks, number=st.integers(1, 3), pause=pauses)
    def send_late_siblings(self, which: int, number: int, pause: int) -> None:
        for _ in range(min(number, len(self.unsent))):
            self.send(*self.unsent.pop(which % len(self.unsent)))
        self.run(pause)

    @precondition(lambda self: self.has_room)
    @rule(prompt=prompts, width=st.integers(2, 5), max_new=lengths, seed=seeds)
    def sample_several(
        self, prompt: list[int], width: int, max_new: int, seed: int | None
    ) -> None:
        """n>1: SGLang commits the prompt with a request for no token first."""
        self.num_groups += 1
        metas = [
            BranchMeta(group=f"g{self.num_groups}", branch=i, width=width)
            for i in range(width)
        ]
        first = self.send(prompt, metas[0], 0)
        for _ in range(200):
            if first.finished():
                break
            self.engine.step()
        assert first.finished()
        for meta in metas:
            self.send(prompt, meta, max_new, seed and seed + meta.branch)

    @precondition(lambda self: self.grouped and self.has_room)
    @rule(parent=picks, suffix=short, max_new=lengths)
    def join(self, parent: int, suffix: list[int], max_new: int) -> None:
        """The parent goes on with what its children have said."""
        req = self.grouped[-1 - parent % len(self.grouped)]
        tokens = [*req.origin_input_ids, *req.output_ids]
        for child in self.grouped:
            if child.taper.meta.parent == req.rid and child.finished():
                tokens += child.output_ids
        meta, salt = req.taper.meta, req.cache_salt
        self.send(tokens + suffix, meta, max_new, None, salt)

    # -- what happens meanwhile

    @rule(number=st.integers(1, 6), seed=st.integers(0, 99))
    def step(self, number: int, seed: int) -> None:
        self.engine.width.random.seed(seed)
        self.run(number)

    def run(self, number: int) -> None:
        for _ in range(number):
            self.engine.step()
            self.checker.check()

    @precondition(lambda self: self.engine.running_batch.reqs)
    @rule()
    def retract(self) -> None:
        """As when memory runs out, by SGLang's own test switch."""
        with mock.patch.multiple(
            sglang_scheduler, TEST_RETRACT=True, TEST_RETRACT_INTERVAL=1
        ):
            self.engine.step()

    @precondition(lambda self: self.reqs)
    @rule(which=picks)
    def abort_branch(self, which: int) -> None:
        self.engine.abort(self.reqs[-1 - which % len(self.reqs)].rid)

    @precondition(lambda self: self.grouped)
    @rule(which=picks, is_subtree=st.booleans())
    def abort_group(self, which: int, is_subtree: bool) -> None:
        req = self.grouped[-1 - which % len(self.grouped)]
        root = req.rid if is_subtree else None
        self.engine._abort_group(req.taper.meta.group, self.engine.now_ms, root)
        if not is_subtree:
            assert not list(self.engine.taper.pins.of(req.taper.group))

    @rule(seconds=st.sampled_from((0.1, 1.0, 2 * TTL_S)))
    def pass_time(self, seconds: float) -> None:
        self.engine.pass_time(seconds)

    @rule(hold_s=st.sampled_from(("off", "auto", 0.05, 1.0)))
    def hold_prefills(self, hold_s: str | float) -> None:
        taper = self.engine.taper
        taper.params = msgspec.structs.replace(taper.params, prefill_hold_s=hold_s)

    @rule()
    def flush(self) -> None:
        """Refused unless idle."""
        is_idle = self.engine.is_fully_idle()
        assert self.engine.flush_cache(empty_cache=False) is is_idle
        if is_idle:
            assert self.engine.tree_cache.total_size()[0] == 0
            assert not len(self.engine.taper.pins)

    @rule()
    def drain(self) -> None:
        for _ in range(3000):
            if not self.engine.step():
                break
        assert not self.engine.waiting_queue, "requests wait and nothing runs"
        self.checker.check_idle()

    @invariant()
    def memory_is_right(self) -> None:
        self.checker.check()

    def teardown(self) -> None:
        self.drain()
        for req in self.reqs:
            assert req.finished() or req.taper.ended
            self.checker.check_tokens(req)
        self.engine.pass_time(2 * TTL_S)
        self.engine.step()
        assert not len(self.engine.taper.pins)
        assert self.engine.tree_cache.protected_size() == 0
        backend = self.engine.tp_worker.attn_backend
        self.reads.append((backend.attention_counters, backend.delayed.counters))
        super().teardown()


@pytest.fixture(params=("rust", "python"))
def core(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_no_event_leaks_or_mixes_up_memory(
    core: str, page_size: int, overlap: bool
) -> None:
    shape = Shape(core, page_size, overlap)
    reads: list[Reads] = []
    with engine_settings(shape):
        run_state_machine_as_test(
            lambda: ForkMachine(shape, reads),
            settings=settings(max_examples=25, stateful_step_count=60),
        )
    # what rows would read for each other was looked at, and often
    for counters in zip(*reads, strict=True):
        assert sum(c.num_shared_steps for c in counters) > 100
