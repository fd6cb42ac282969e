"""A decode step as two levels with a fixed number of group slots (numpy, on the host).

FlashInfer's first level sees *slots*: each a number of consecutive queries over one
list of keys. A captured graph fixes how many there are, so groups take the first slots,
unused ones are empty, and the last holds every row without a group, over no keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_taper.ops.segments import Segment

Ints = NDArray[np.int32]
MAX_LARGE_TILE_SLOTS = 16


class Group(msgspec.Struct, frozen=True):
    """Rows that read their first `num_tokens` tokens from the same slots."""

    rows: tuple[int, ...]
    num_tokens: int

    @property
    def saved_tokens(self) -> int:
        """KV tokens that need not be read when one read serves all rows."""
        return (len(self.rows) - 1) * self.num_tokens


class TwoLevels(NamedTuple):
    """The host side of both plans. Lengths are tokens; page size is 1."""

    groups: tuple[Group, ...]
    row_order: Ints  # [rows] rows as the first level sees them
    shared_row: Ints  # [rows] where a row is in that order, -1 without a group
    qo_indptr: Ints  # [slots + 1] queries of each slot
    shared_indptr: Ints  # [slots + 1] keys of each slot
    private_start: Ints  # [rows]
    private_indptr: Ints  # [rows + 1] keys of each row


def tile_rows(num_rows: int, num_slots: int, head_ratio: int, head_dim: int) -> int:
    """Packed queries per tile that FlashInfer 0.7.2 (FA2) chooses for a captured plan.

    It sizes the tile for the longest slot there can be if every other has one row.
    """
    longest = (num_rows - num_slots + 1) * head_ratio
    if longest > 64 and head_dim < 256:
        return 128
    return 64 if longest > 16 else 16


def num_slots_for(num_rows: int, head_ratio: int, wanted_tile_rows: int) -> int:
    """Fewest slots, the ungrouped one included, that give tiles of the wanted size.

    Tiles of 64 suit groups of up to `64 / head_ratio` rows: a narrow group in a tile
    of 128 costs more compute than reads. With 128 there is no lower limit, and a step
    rarely has more than `MAX_LARGE_TILE_SLOTS` groups.
    """
    if wanted_tile_rows >= 128:
        return min(MAX_LARGE_TILE_SLOTS, max(num_rows // 2, 1)) + 1
    longest = max(1, wanted_tile_rows // head_ratio)
    return max(2, num_rows - longest + 1)


def slots_for_groups(
    num_rows: int, head_ratio: int, head_dim: int, wanted_tile_rows: int
) -> int:
    """`num_slots_for`, and more if that makes room for groups but no smaller tiles.

    Small tiles are not split along a prefix, which would be walked serially.
    """
    fewest = num_slots_for(num_rows, head_ratio, wanted_tile_rows)
    tile = tile_rows(num_rows, fewest, head_ratio, head_dim)
    slots = max(fewest, num_rows // 2 + 1)
    while tile_rows(num_rows, slots, head_ratio, head_dim) < tile:
        slots -= 1
    return slots


def choose_groups(segments: Sequence[Segment], max_groups: int) -> tuple[Group, ...]:
    """At most `max_groups` disjoint groups from a tree, to save the most reads.

    Of a segment and what is below it, either the whole context up to the segment's end
    is one group of its rows, or the groups below are kept. The rest is private.
    """
    segments = [segment for segment in segments if segment.start < segment.end]
    chosen: dict[int, Group] = {}  # by row
    for segment in reversed(segments):
        if len(segment.rows) < 2 or not _reaches_root(segments, segment):
            continue
        candidate = Group(segment.rows, segment.end)
        below = {chosen[row] for row in segment.rows if row in chosen}
        if candidate.saved_tokens >= sum(group.saved_tokens for group in below):
            for group in below:
                for row in group.rows:
                    del chosen[row]
            chosen |= dict.fromkeys(segment.rows, candidate)
    groups = sorted(set(chosen.values()), key=lambda g: (-g.saved_tokens, g.rows))
    return tuple(groups[:max_groups])


def _reaches_root(segments: Sequence[Segment], segment: Segment) -> bool:
    """Whether the rows share not only this segment but everything before it."""
    if segment.start == 0:
        return True
    rows = set(segment.rows)
    return any(
        above.end == segment.start
        and rows <= set(above.rows)
        and _reaches_root(segments, above)
        for above in segments
    )


def plan_two_levels(
    groups: Sequence[Group], seq_lens: Sequence[int], num_rows: int, num_slots: int
) -> TwoLevels:
    """Both levels of a step; rows beyond `seq_lens` are padding without keys.

    `groups` are disjoint and fewer than `num_slots`.
    """
    grouped = [row for group in groups for row in group.rows]
    in_group = np.zeros(num_rows, bool)
    in_group[grouped] = True
    row_order = np.array([*grouped, *np.flatnonzero(~in_group)], np.int32)
    shared_row = np.full(num_rows, -1, np.int32)
    shared_row[grouped] = np.arange(len(grouped))
    private_start = np.zeros(num_rows, np.int32)
    for group in groups:
        private_start[list(group.rows)] = group.num_tokens
    lens = np.zeros(num_rows, np.int32)
    lens[: len(seq_lens)] = seq_lens
    qo_indptr = _padded_sums([len(group.rows) for group in groups], num_slots + 1)
    qo_indptr[-1] = num_rows
    return TwoLevels(
        groups=tuple(groups),
        row_order=row_order,
        shared_row=shared_row,
        qo_indptr=qo_indptr,
        shared_indptr=_padded_sums([g.num_tokens for g in groups], num_slots + 1),
        private_start=private_start,
        private_indptr=_padded_sums(lens - private_start, num_rows + 1),
    )


def _padded_sums(counts: Sequence[int] | Ints, size: int) -> Ints:
    """0 and the running sums; the last repeated up to `size`."""
    sums = np.concatenate([[0], np.cumsum(counts)])
    return np.pad(sums, (0, size - len(sums)), mode="edge").astype(np.int32)
