"""Rows share what their slots say they share, and only within their group."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_taper.engine.attention.counting import AttentionCounters
from sglang_taper.engine.attention.prefixes import Member, StepPrefixes, num_equal
from sglang_taper.ops.segments import (
    Segment,
    StepLayout,
    check_layout,
    private_starts,
    segments_of,
)

PREFIX = list(range(100, 200))


class Rows:
    """Request rows with slots, and a reader that counts how often it is asked."""

    def __init__(self) -> None:
        self.table: dict[int, list[int]] = {}
        self.num_reads = 0
        self.on_their_way: set[int] = set()

    def read(self, member: Member) -> np.ndarray | None:
        self.num_reads += 1
        assert member.num_tokens < len(self.table[member.row])
        if member.row in self.on_their_way:
            return None
        return np.array(self.table[member.row][: member.num_tokens], np.int32)

    def add(self, group: Any, row: int, slots: list[int]) -> Any:
        self.table[row] = slots
        branch = SimpleNamespace(group=group, ended=False)
        kv = SimpleNamespace(req_pool_idx=row)
        return SimpleNamespace(taper=branch, kv=kv, retraction_count=0)

    def segments(self, prefixes: StepPrefixes, reqs: list[Any]) -> list[Segment]:
        prefixes.announce(reqs)
        rows = [req.kv.req_pool_idx for req in reqs]
        return prefixes.segments(rows, [len(self.table[r]) for r in rows], self.read)


class Group:
    num_live = 1


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_rows_of_a_group_share_their_equal_slots(rows: Rows) -> None:
    group = Group()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row, 7]) for row in (5, 2, 9)]
    assert rows.segments(StepPrefixes(), reqs) == [Segment((0, 1, 2), 0, 100)]


def test_equal_slots_of_different_groups_are_not_shared(rows: Rows) -> None:
    reqs = [rows.add(Group(), row, [*PREFIX, 1000 + row]) for row in range(3)]
    assert rows.segments(StepPrefixes(), reqs) == []


def test_requests_without_a_group_share_nothing(rows: Rows) -> None:
    reqs = [rows.add(None, row, [*PREFIX, 1000 + row]) for row in range(3)]
    assert rows.segments(StepPrefixes(), reqs) == []


def test_copied_slots_are_not_shared(rows: Rows) -> None:
    group = Group()
    copied = [slot + 5000 for slot in PREFIX]
    reqs = [rows.add(group, 0, [*PREFIX, 1]), rows.add(group, 1, [*copied, 2])]
    assert rows.segments(StepPrefixes(), reqs) == []


def test_the_newest_token_is_private_even_with_equal_slots(rows: Rows) -> None:
    group = Group()
    reqs = [rows.add(group, row, PREFIX) for row in range(2)]
    assert rows.segments(StepPrefixes(), reqs) == [Segment((0, 1), 0, 99)]


def test_branches_that_fork_again_give_nested_segments(rows: Rows) -> None:
    group = Group()
    inner = [*PREFIX, *range(300, 350)]
    reqs = [
        rows.add(group, 0, [*PREFIX, *range(900, 950)]),
        rows.add(group, 1, [*inner, 1, 2]),
        rows.add(group, 2, [*inner, 3]),
    ]
    found = rows.segments(StepPrefixes(), reqs)
    assert found[0].end == 100
    assert sorted(found[0].rows) == [0, 1, 2]
    assert found[1:] == [Segment((1, 2), 100, 150)]


def test_slots_are_compared_once_while_the_branches_stay(rows: Rows) -> None:
    group, prefixes = Group(), StepPrefixes()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row]) for row in range(4)]
    first = rows.segments(prefixes, reqs)
    for req in reqs:
        rows.table[req.kv.req_pool_idx].append(2000 + req.kv.req_pool_idx)
    assert rows.segments(prefixes, reqs) == first
    assert rows.num_reads == 4


def test_a_row_shares_from_when_its_slots_are_known(rows: Rows) -> None:
    group, prefixes = Group(), StepPrefixes()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row]) for row in range(3)]
    rows.on_their_way = {1, 2}
    assert rows.segments(prefixes, reqs) == []
    rows.on_their_way = {1}
    assert rows.segments(prefixes, reqs) == [Segment((0, 2), 0, 100)]
    rows.on_their_way = set()
    assert rows.segments(prefixes, reqs) == [Segment((0, 1, 2), 0, 100)]
    known = rows.num_reads
    assert rows.segments(prefixes, reqs) == [Segment((0, 1, 2), 0, 100)]
    assert rows.num_reads == known


def test_deferred_branches_do_not_make_the_others_compare_again(rows: Rows) -> None:
    group, prefixes = Group(), StepPrefixes()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row]) for row in range(4)]
    rows.segments(prefixes, reqs)
    assert rows.segments(prefixes, reqs[1:3]) == [Segment((0, 1), 0, 100)]
    assert rows.segments(prefixes, reqs[3:]) == []
    assert rows.num_reads == 4


def test_a_row_that_has_a_new_owner_is_compared_again(rows: Rows) -> None:
    group, prefixes = Group(), StepPrefixes()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row]) for row in range(3)]
    rows.segments(prefixes, reqs)
    reqs[1].taper.ended = True
    late = rows.add(group, 1, [*PREFIX[:40], *range(700, 760)])
    found = rows.segments(prefixes, [reqs[0], late, reqs[2]])
    assert [(set(s.rows), s.start, s.end) for s in found] == [
        ({0, 1, 2}, 0, 40),
        ({0, 2}, 40, 100),
    ]


def test_a_pass_that_was_not_announced_shares_nothing(rows: Rows) -> None:
    group, prefixes = Group(), StepPrefixes()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row]) for row in range(2)]
    prefixes.announce(reqs)
    assert prefixes.segments([1, 0], [101, 101], rows.read) == []


def test_groups_without_a_living_branch_are_forgotten(rows: Rows) -> None:
    group, prefixes = Group(), StepPrefixes()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row]) for row in range(2)]
    rows.segments(prefixes, reqs)
    group.num_live = 0
    rows.segments(prefixes, [])
    assert prefixes._orders == {}


def test_segments_shorter_than_the_least_are_left_to_the_rows() -> None:
    assert segments_of([4, 2], [15], 16) == []
    assert segments_of([4, 2], [16], 16) == [Segment((2, 4), 0, 16)]
    nested = segments_of([4, 2, 3], [20, 30], 16)
    assert nested == [Segment((2, 3, 4), 0, 20)]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), min_tokens=st.integers(1, 5))
def test_segments_hold_equal_slots_and_leave_little(seed: int, min_tokens: int) -> None:
    random = Random(seed)
    slots = sorted(_random_rows(random))
    common = [num_equal(np.array(a), np.array(b)) for a, b in zip(slots, slots[1:])]  # noqa: B905, RUF007
    order = random.sample(range(len(slots)), len(slots))
    segments = segments_of(order, common, min_tokens)
    of_row = dict(zip(order, slots, strict=True))
    lens = tuple(len(of_row[row]) for row in range(len(slots)))
    layout = StepLayout(tuple(segments), lens)
    check_layout(layout)
    for segment in segments:
        assert segment.end - segment.start >= min_tokens
        parts = {tuple(of_row[r][segment.start : segment.end]) for r in segment.rows}
        assert len(parts) == 1
    starts = private_starts(layout)
    for left, right, equal in zip(order, order[1:], common, strict=False):
        shared = min(starts[left], starts[right], equal)
        assert equal - shared < min_tokens


def _random_rows(random: Random) -> list[list[int]]:
    rows = [[random.randrange(3) for _ in range(random.randrange(20))]]
    for _ in range(random.randrange(8)):
        kept = random.choice(rows)
        kept = kept[: random.randrange(len(kept) + 1)]
        rows.append([*kept, *(random.randrange(3) for _ in range(random.randrange(9)))])
    return rows


def test_counters_tell_how_many_tokens_were_not_read_again() -> None:
    counters = AttentionCounters()
    segments = [Segment((0, 1, 2), 0, 100), Segment((1, 2), 100, 130)]
    counters.decode_step([140, 140, 150, 7], segments, num_saved=230)
    counters.decode_step([5], [], num_saved=0)
    assert (counters.num_decode_steps, counters.num_shared_steps) == (2, 1)
    assert counters.num_shared_rows == 3
    assert counters.num_kv_tokens == 442
    assert counters.num_saved_tokens == 230


def test_a_branch_that_was_retracted_is_compared_again(rows: Rows) -> None:
    """It may come back to its old row, with KV that was computed again."""
    group, prefixes = Group(), StepPrefixes()
    reqs = [rows.add(group, row, [*PREFIX, 1000 + row]) for row in range(2)]
    assert rows.segments(prefixes, reqs) == [Segment((0, 1), 0, 100)]
    reqs[1].retraction_count += 1
    rows.table[1] = [slot + 5000 for slot in rows.table[1]]
    assert rows.segments(prefixes, reqs) == []
