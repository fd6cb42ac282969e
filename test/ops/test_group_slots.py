"""Groups, slots and tiles of the two-level composition (host side)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import tree

from sglang_taper.ops.group_slots import (
    Group,
    choose_groups,
    num_slots_for,
    plan_two_levels,
    slots_for_groups,
    tile_rows,
)
from sglang_taper.ops.segments import Segment


@pytest.mark.parametrize(
    ("num_slots", "rows_per_tile"),
    [(5, 128), (17, 128), (56, 128), (57, 64), (62, 64), (63, 16), (64, 16)],
)
def test_slots_decide_the_tile_as_flashinfers_planner_does(
    num_slots: int, rows_per_tile: int
) -> None:
    """64 rows, 64 query and 8 KV heads: as its planner answered when it was asked."""
    assert tile_rows(64, num_slots, 8, 128) == rows_per_tile


@given(st.integers(2, 512), st.integers(1, 16), st.sampled_from([64, 128]))
def test_slots_for_a_tile_give_at_most_that_tile(
    rows: int, ratio: int, wanted: int
) -> None:
    slots = num_slots_for(rows, ratio, wanted)
    assert 2 <= slots <= rows
    assert tile_rows(rows, slots, ratio, 128) <= wanted
    if wanted == 64 and rows > 64 // ratio + 1:
        assert tile_rows(rows, slots - 1, ratio, 128) == 128
    if wanted == 128 and rows * ratio > 256:
        assert tile_rows(rows, slots, ratio, 128) == 128


@given(st.integers(2, 512), st.integers(1, 16), st.sampled_from([64, 128, 256]))
def test_more_slots_make_room_for_groups_and_no_smaller_tiles(
    rows: int, ratio: int, dim: int
) -> None:
    fewest = num_slots_for(rows, ratio, 64)
    slots = slots_for_groups(rows, ratio, dim, 64)
    assert fewest <= slots <= rows
    tile = tile_rows(rows, fewest, ratio, dim)
    assert tile_rows(rows, slots, ratio, dim) == tile
    if slots < rows // 2 + 1:
        assert tile_rows(rows, slots + 1, ratio, dim) < tile


def test_eight_rows_may_be_of_four_groups() -> None:
    assert slots_for_groups(8, 8, 128, 64) == 5
    assert slots_for_groups(4, 8, 128, 64) == 2
    assert slots_for_groups(64, 8, 128, 64) == 57


def test_a_tree_is_cut_where_it_saves_the_most_reads() -> None:
    root, inner = Segment((0, 1, 2, 3), 0, 100), Segment((1, 2), 100, 1000)
    assert choose_groups([root, inner], 9) == (Group((1, 2), 1000),)
    short = Segment((1, 2), 100, 150)
    assert choose_groups([root, short], 9) == (Group((0, 1, 2, 3), 100),)


def test_two_inner_groups_together_may_beat_their_root() -> None:
    root = Segment((0, 1, 2, 3), 0, 100)
    pairs = [Segment((0, 1), 100, 180), Segment((2, 3), 100, 180)]
    assert choose_groups([root, *pairs], 9) == (
        Group((0, 1), 180),
        Group((2, 3), 180),
    )


def test_rows_that_share_a_part_but_not_what_is_before_are_no_group() -> None:
    layout = tree(([0, 1], 0, 50), ([2, 3], 0, 50), ([1, 2], 50, 5000), lens=[5001] * 4)
    groups = choose_groups(layout.segments, 9)
    assert {group.rows for group in groups} == {(0, 1), (2, 3)}


def test_segments_of_one_row_or_no_tokens_are_no_groups() -> None:
    segments = [Segment((0,), 0, 900), Segment((1, 2), 0, 0), Segment((1, 2), 0, 8)]
    assert choose_groups(segments, 9) == (Group((1, 2), 8),)


def test_of_too_many_groups_the_cheapest_are_left_out() -> None:
    segments = [Segment((2 * i, 2 * i + 1), 0, 10 * (i + 1)) for i in range(4)]
    kept = choose_groups(segments, 2)
    assert [group.num_tokens for group in kept] == [40, 30]


def test_both_levels_of_a_step() -> None:
    groups = (Group((4, 1), 100), Group((0, 3), 7))
    levels = plan_two_levels(groups, (8, 120, 5, 7, 101), num_rows=6, num_slots=5)
    assert levels.row_order.tolist() == [4, 1, 0, 3, 2, 5]
    assert levels.shared_row.tolist() == [2, 1, -1, 3, 0, -1]
    assert levels.qo_indptr.tolist() == [0, 2, 4, 4, 4, 6]
    assert levels.shared_indptr.tolist() == [0, 100, 107, 107, 107, 107]
    assert levels.private_start.tolist() == [7, 100, 0, 7, 100, 0]
    assert levels.private_indptr.tolist() == [0, 1, 21, 26, 26, 27, 27]


@st.composite
def grouped_steps(draw: st.DrawFn) -> tuple[tuple[Group, ...], list[int], int]:
    rows = draw(st.permutations(range(draw(st.integers(2, 24)))))
    groups, left = [], list(rows)
    while len(left) > 1 and draw(st.booleans()):
        width = draw(st.integers(2, len(left)))
        tokens = draw(st.integers(1, 50))
        groups.append(Group(tuple(left[:width]), tokens))
        left = left[width:]
    start = {row: group.num_tokens for group in groups for row in group.rows}
    lens = [start.get(row, 0) + draw(st.integers(0, 9)) for row in range(len(rows))]
    slots = len(groups) + draw(st.integers(1, 4))
    return tuple(groups), lens, slots


@given(grouped_steps())
def test_every_token_is_in_one_level_and_every_row_in_one_slot(
    step: tuple[tuple[Group, ...], list[int], int],
) -> None:
    groups, lens, num_slots = step
    levels = plan_two_levels(groups, lens, len(lens), num_slots)
    assert sorted(levels.row_order.tolist()) == list(range(len(lens)))
    assert levels.qo_indptr[-1] == len(lens)
    shared = np.diff(levels.shared_indptr)
    assert shared[-1] == 0, "rows without a group have no keys on the first level"
    private = np.diff(levels.private_indptr)
    for row, length in enumerate(lens):
        source = levels.shared_row[row]
        prefix = 0
        if source >= 0:
            assert levels.row_order[source] == row
            slot = np.searchsorted(levels.qo_indptr, source, side="right") - 1
            prefix = shared[slot]
        assert prefix == levels.private_start[row]
        assert prefix + private[row] == length
