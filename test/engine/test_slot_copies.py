"""Slots of new branches reach the host without a wait, the same step on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_taper.engine.attention.prefixes import Member, StepPrefixes, key_of
from sglang_taper.engine.attention.slot_copies import PASSES_UNTIL_READ, SlotCopies
from sglang_taper.ops.segments import Segment

PREFIX = 50


class FakeEvent:
    """Knows how often it was recorded and waited for."""

    made: list[FakeEvent]

    def __init__(self) -> None:
        self.num_recorded = self.num_waits = 0
        FakeEvent.made.append(self)

    def record(self) -> None:
        self.num_recorded += 1

    def synchronize(self) -> None:
        assert self.num_recorded == 1
        self.num_waits += 1


class Group:
    num_live = 2


@pytest.fixture
def copies() -> SlotCopies:
    """Rows 1 and 2 of the table have the same first 50 slots."""
    FakeEvent.made = []
    table = torch.arange(4 * 80, dtype=torch.int32).view(4, 80)
    table[2, :PREFIX] = table[1, :PREFIX]
    return SlotCopies(table, FakeEvent)


def make_req(row: int, group: Any) -> Any:
    return SimpleNamespace(
        taper=SimpleNamespace(group=group, ended=False),
        kv=SimpleNamespace(req_pool_idx=row),
        retraction_count=0,
    )


def member_of(req: Any, num_tokens: int = 60) -> Member:
    return Member(req, key_of(req), num_tokens)


def test_slots_are_known_two_passes_after_they_were_asked_for(
    copies: SlotCopies,
) -> None:
    member = member_of(make_req(1, Group()))
    for _ in range(PASSES_UNTIL_READ):
        assert copies(member) is None
        assert copies(member) is None
        copies.passed()
    assert [event.num_waits for event in FakeEvent.made] == [0]
    assert copies.pending
    slots = copies(member)
    assert slots is not None
    assert slots.tolist() == list(range(80, 140))
    assert [event.num_waits for event in FakeEvent.made] == [1]
    assert not copies.pending


def test_what_is_read_is_what_was_there_when_it_was_asked_for(
    copies: SlotCopies,
) -> None:
    member = member_of(make_req(1, Group()), num_tokens=3)
    copies(member)
    copies._table.zero_()
    for _ in range(PASSES_UNTIL_READ):
        copies.passed()
    slots = copies(member)
    assert slots is not None
    assert slots.tolist() == [80, 81, 82]


def test_a_new_owner_of_a_row_gets_slots_of_its_own(copies: SlotCopies) -> None:
    first = make_req(1, Group())
    copies(member_of(first))
    first.taper.ended = True
    copies.passed()
    assert not copies.pending
    second = make_req(1, Group())
    copies.passed()
    assert copies(member_of(second)) is None


def test_a_group_shares_from_the_pass_in_which_all_slots_are_known(
    copies: SlotCopies,
) -> None:
    group, prefixes = Group(), StepPrefixes()
    reqs = [make_req(1, group), make_req(2, group)]
    found = []
    for _ in range(PASSES_UNTIL_READ + 2):
        found.append(prefixes.segments_among(reqs, [61, 61], copies))
        copies.passed()
    shared = [Segment((0, 1), 0, PREFIX)]
    assert found == [[]] * PASSES_UNTIL_READ + [shared, shared]
    assert len(FakeEvent.made) == 2
