"""A shared prefix is counted once exactly if the planned step reads it once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_taper.config import TaperConfig
from sglang_taper.engine.attention.use import SharedTokens, announce, may_share
from sglang_taper.engine.controller import BranchController
from sglang_taper.engine.pins import PinTable
from sglang_taper.engine.prefix import PrefixTree
from sglang_taper.ops.segments import Segment
from sglang_taper.policy.latency import StepLatencyModel
from sglang_taper.protocol import BranchMeta

LENS = [110, 120, 130]
PREFIX = 100


class Backend:
    """Shares `PREFIX` among all rows from when it knows their slots."""

    may_share, waits_for_slots = True, False
    would_share = True

    def __init__(self) -> None:
        self.asked: list[tuple[list[Any], tuple[int, ...]]] = []
        self.announced: list[Any] = []

    def announce(self, *step: Any) -> None:
        self.announced.append(step)

    def segments_among(self, reqs: list[Any], seq_lens: tuple[int, ...]) -> Any:
        self.asked.append((reqs, seq_lens))
        return () if self.waits_for_slots else [Segment((0, 1, 2), 0, PREFIX)]

    def would_not_share(self, reqs: list[Any], seq_lens: Any) -> bool:
        self.asked.append((reqs, tuple(seq_lens)))
        return not self.would_share


def make_controller(read_once: bool) -> BranchController:
    no_tree: Any = None
    return BranchController(
        TaperConfig(branch_policy="eager"),
        StepLatencyModel(shared_read_once=read_once),
        num_ranks=1,
        asynchronous=False,
        pins=PinTable(PrefixTree(no_tree), max_tokens=0),
        page_size=1,
    )


def make_batch(controller: BranchController) -> Any:
    reqs = []
    for index in range(len(LENS)):
        branch = controller.attach(str(index), BranchMeta(group="g"), 0.0, 8)
        reqs.append(SimpleNamespace(taper=branch, to_finish=None, beam_group=None))
    return SimpleNamespace(
        reqs=reqs,
        seq_lens_cpu=torch.tensor(LENS),
        req_pool_indices=torch.arange(len(LENS)),
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )


def planned_tokens(read_once: bool, backend: Any) -> int:
    controller = make_controller(read_once)
    batch = make_batch(controller)
    shared = SharedTokens(backend)
    shared.note(batch)
    plan = controller.plan(batch, [], lambda rows: shared.each_reads(batch, rows))
    assert plan.rows == [0, 1, 2]
    return controller.counters.recent_steps[-1].kv_tokens


def test_a_step_that_reads_once_is_counted_once() -> None:
    assert planned_tokens(True, Backend()) == sum(LENS) - 2 * PREFIX


def test_a_step_the_gate_would_leave_plain_is_planned_with_whole_contexts() -> None:
    backend = Backend()
    backend.would_share = False
    assert planned_tokens(True, backend) == sum(LENS)
    # of the planned rows, with the token that the step computes
    _, lens = backend.asked[-1]
    assert lens == tuple(length + 1 for length in LENS)


@pytest.mark.parametrize("backend", [None, SimpleNamespace(may_share=False)])
def test_attention_that_never_shares_is_not_asked(backend: Any) -> None:
    assert not may_share(backend)
    assert planned_tokens(False, backend) == sum(LENS)


def test_what_rows_share_is_asked_again_while_slots_are_on_their_way() -> None:
    backend, controller = Backend(), make_controller(True)
    batch, shared = make_batch(controller), SharedTokens(backend)
    branches = [req.taper.state for req in batch.reqs]
    backend.waits_for_slots = True
    for _ in range(2):
        shared.note(batch)
        assert [branch.shared_tokens for branch in branches] == [0, 0, 0]
    backend.waits_for_slots = False
    for _ in range(3):
        shared.note(batch)
        assert [branch.shared_tokens for branch in branches] == [PREFIX] * 3
    assert len(backend.asked) == 3


def test_a_pass_is_announced_with_its_rows_and_lengths() -> None:
    backend, batch = Backend(), make_batch(make_controller(True))
    announce(backend, batch)
    batch.forward_mode = SimpleNamespace(is_decode=lambda: False)
    announce(backend, batch)
    announce(None, batch)
    decode, other = backend.announced
    assert decode == (batch.reqs, batch.req_pool_indices, LENS)
    assert other == (batch.reqs, batch.req_pool_indices, None)
