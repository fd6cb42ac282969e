"""Tiles of a decode step: what they cover, and that they fit the buffers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import group, tree

from sglang_taper.errors import FieldError
from sglang_taper.ops.segments import Segment, StepLayout, private_starts
from sglang_taper.ops.work_list import (
    LARGE_M,
    SMALL_M,
    TILE_FIELDS,
    Capacity,
    WorkList,
    WorkListPlanner,
    capacity_for,
)

LEVELS = 4


def make_planner(
    rows: int = 16, ratio: int = 4, kv_heads: int = 2, programs: int = 8
) -> WorkListPlanner:
    capacity = capacity_for(rows, ratio, kv_heads, programs, LEVELS)
    return WorkListPlanner(
        capacity, head_ratio=ratio, num_kv_heads=kv_heads, num_programs=programs
    )


def make_list(capacity: Capacity) -> WorkList:
    """Full of a number that is no index, to show what was not written."""

    def ints(*shape: int) -> np.ndarray:
        return np.full(shape, 10**6, np.int32)

    return WorkList(
        num_tiles=ints(1),
        row_start=ints(capacity.rows + 1),
        entry_row=ints(capacity.entries),
        entry_slot=ints(capacity.entries),
        tiles=ints(capacity.tiles, TILE_FIELDS),
    )


def plan(planner: WorkListPlanner, layout: StepLayout) -> WorkList:
    into = make_list(planner.capacity)
    planner.fill(layout, into)
    return into


def covered(work: WorkList, ratio: int) -> tuple[Counter, Counter]:
    """How often each (row, head of the ratio, token) is read, and each (partial, head)
    written."""
    reads: Counter = Counter()
    writes: Counter = Counter()
    for tile in work.tiles[: work.num_tiles[0]].tolist():
        entry, rows, block, first, last, split, is_large, _ = tile
        size = LARGE_M if is_large else SMALL_M
        for packed in range(block * size, min((block + 1) * size, rows * ratio)):
            at, head = entry + packed // ratio, packed % ratio
            row = int(work.entry_row[at])
            reads.update((row, head, token) for token in range(first, last))
            writes[int(work.entry_slot[at]) + split, head] += 1
    return reads, writes


@st.composite
def layouts(draw: st.DrawFn) -> StepLayout:
    """Trees of up to four levels over at most 16 rows, in any order."""
    rows = draw(st.permutations(range(draw(st.integers(1, 16)))))
    lens = [0] * len(rows)
    segments = []

    def grow(members: list[int], start: int, levels: int) -> None:
        end = start + draw(st.integers(0, 600))
        segments.append(Segment(tuple(members), start, end))
        for row in members:
            lens[row] = end
        if levels > 1 and len(members) > 2 and draw(st.booleans()):
            cut = draw(st.integers(1, len(members) - 1))
            for half in (members[:cut], members[cut:]):
                if len(half) > 1:
                    grow(half, end, levels - 1)

    left = list(rows)
    while left:
        size = draw(st.integers(1, len(left)))
        members, left = left[:size], left[size:]
        if size > 1:
            grow(members, 0, LEVELS)
    private = [draw(st.integers(0, 300)) for _ in rows]
    total = [a + b for a, b in zip(lens, private, strict=True)]
    return StepLayout(tuple(segments), tuple(total))


@given(layouts(), st.sampled_from([1, 3, 4, 8, 20]))
@settings(max_examples=60)
def test_every_key_of_a_row_is_read_once_by_every_head(
    layout: StepLayout, ratio: int
) -> None:
    work = plan(make_planner(ratio=ratio), layout)
    reads, writes = covered(work, ratio)
    assert reads == {
        (row, head, token): 1
        for row, length in enumerate(layout.seq_lens)
        for head in range(ratio)
        for token in range(length)
    }
    partials = int(work.row_start[len(layout.seq_lens)])
    assert writes == {(p, h): 1 for p in range(partials) for h in range(ratio)}


@given(layouts())
@settings(max_examples=60)
def test_the_partials_of_a_row_are_in_the_order_of_its_tokens(
    layout: StepLayout,
) -> None:
    work = plan(make_planner(), layout)
    first_token: dict[int, tuple[int, int]] = {}
    for tile in work.tiles[: work.num_tiles[0]].tolist():
        for at in range(tile[0], tile[0] + tile[1]):
            partial = int(work.entry_slot[at]) + tile[5]
            first_token[partial] = (int(work.entry_row[at]), tile[3])
    ordered = [first_token[p] for p in range(len(first_token))]
    assert ordered == sorted(ordered)
    owners = [row for row, _ in ordered]
    for row in range(len(layout.seq_lens)):
        begin, end = work.row_start[row : row + 2]
        assert owners[begin:end] == [row] * (end - begin)


@given(layouts(), st.sampled_from([1, 4, 8]), st.sampled_from([1, 8]))
@settings(max_examples=60)
def test_any_tree_of_the_allowed_depth_fits(
    layout: StepLayout, ratio: int, kv_heads: int
) -> None:
    planner = make_planner(ratio=ratio, kv_heads=kv_heads, programs=264)
    work = plan(planner, layout)
    assert work.num_tiles[0] <= planner.capacity.tiles
    assert work.row_start[-1] <= planner.capacity.partials


def test_work_is_even_over_the_programs_and_long_tiles_come_first() -> None:
    programs, kv_heads = 264, 8
    planner = make_planner(64, 8, kv_heads, programs)
    segments = [Segment(tuple(range(8 * i, 8 * i + 8)), 0, 8192) for i in range(8)]
    layout = StepLayout(tuple(segments), (8192 + 128,) * 64)
    tiles = plan(planner, layout).tiles
    count = planner.fill(layout, make_list(planner.capacity))
    keys = (tiles[:count, 4] - tiles[:count, 3]).tolist()
    assert keys == sorted(keys, reverse=True)
    load = np.zeros(programs)
    for item in range(count * kv_heads):
        load[item % programs] += keys[item // kv_heads]
    assert load.max() < 1.25 * load.mean()


def test_splits_are_not_smaller_than_what_is_worth_a_partial() -> None:
    work = plan(make_planner(programs=264), group(8, 1000, 1))
    tiles = work.tiles[: work.num_tiles[0]]
    shared = tiles[tiles[:, 1] == 8]
    assert (shared[:, 4] - shared[:, 3]).min() >= 100
    assert len(shared) > 1


def test_narrow_parts_take_small_tiles() -> None:
    work = plan(make_planner(ratio=4), tree((range(5), 0, 9), lens=[10] * 6))
    sizes = {int(t[1]): int(t[6]) for t in work.tiles[: work.num_tiles[0]]}
    assert sizes == {5: 1, 1: 0}


def test_segments_that_stay_need_no_second_look_but_longer_rows_do() -> None:
    planner = make_planner()
    layout = group(3, 20, 4)
    first = plan(planner, layout)
    longer = StepLayout(layout.segments, tuple(n + 1 for n in layout.seq_lens))
    second = plan(planner, longer)
    assert np.array_equal(first.entry_slot, second.entry_slot)
    reads, _ = covered(second, 4)
    assert len(reads) == 3 * 4 * 25


def test_rows_that_end_inside_what_they_share_are_refused() -> None:
    planner = make_planner()
    layout = group(3, 20, 4)
    plan(planner, layout)
    shorter = StepLayout(layout.segments, (24, 19, 24))
    with pytest.raises(FieldError, match=r"seq_lens\[1\]=19"):
        plan(planner, shorter)


def test_more_rows_or_levels_than_the_buffers_hold_are_refused() -> None:
    planner = make_planner(rows=4)
    with pytest.raises(FieldError, match="rows of seq_lens=5"):
        plan(planner, group(5, 20, 4))
    levels = [(range(4), i, i + 1) for i in range(LEVELS + 1)]
    with pytest.raises(FieldError, match="rows of segments"):
        plan(planner, tree(*levels, lens=[9] * 4))


def test_too_many_tiles_are_refused_after_splitting_less() -> None:
    lacking = Capacity(rows=4, entries=20, tiles=3, partials=100)
    planner = WorkListPlanner(lacking, head_ratio=1, num_kv_heads=1, num_programs=99)
    assert plan(planner, group(2, 5000, 0)).num_tiles[0] <= 3
    with pytest.raises(FieldError, match="tiles of segments=4"):
        plan(planner, StepLayout((), (1, 1, 1, 1)))


def test_an_empty_step_has_no_tiles() -> None:
    work = plan(make_planner(), StepLayout((), (0, 0)))
    assert work.num_tiles[0] == 0
    assert (work.row_start == 0).all()
    assert private_starts(StepLayout((), (0, 0))) == [0, 0]
