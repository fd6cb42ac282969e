"""The work of a decode step as tiles for the kernel (numpy, on the host).

A *part* is a segment of the layout or the private tokens of one row. Each part's keys
are cut into equal *splits*, its packed queries into blocks of 16 or 64, and every pair
is a tile. Splits are sized so that all programs get about the same number of keys, and
so that tiles and partial outputs fit the buffers, which never grow.

`row_start[row]` counts partial outputs: row `r` owns [row_start[r], row_start[r + 1]),
ordered by position in its context. An *entry* is a (part, row) pair; the partial of
split `i` of an entry is `entry_slot[entry] + i`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_taper.errors import FieldError
from sglang_taper.ops.segments import Segment, StepLayout, check_layout, private_starts

Ints = NDArray[np.int32]
# entry, rows, query block, first key, end of keys, split, is a large tile, unused
TILE_FIELDS = 8
SMALL_M, LARGE_M = 16, 64
MIN_SPLIT_KEYS = 128
# Splits begin at multiples of the kernel's key block, relative to their part.
SPLIT_GRANULE = 64
# Tiles per program: two even out what differs between tiles.
WAVES = 2


class Capacity(msgspec.Struct, frozen=True):
    """What the static buffers hold."""

    rows: int
    entries: int
    tiles: int
    partials: int


class WorkList(NamedTuple):
    """Views of the arrays the kernel reads; the planner writes into them."""

    num_tiles: Ints  # [1]
    row_start: Ints  # [rows + 1]
    entry_row: Ints  # [entries]
    entry_slot: Ints  # [entries]
    tiles: Ints  # [tiles, TILE_FIELDS]


def capacity_for(
    max_rows: int, head_ratio: int, num_kv_heads: int, num_programs: int, levels: int
) -> Capacity:
    """Room for any tree of at most `levels` levels over `max_rows` rows.

    Without a split there is a tile per private part and per block of a segment's
    queries, and segments of a level are disjoint sets of at least two rows.
    """
    blocks = max_rows // 2 + max_rows * head_ratio // LARGE_M + 1
    private_blocks = max_rows * -(-head_ratio // LARGE_M)
    splits = 2 * -(-WAVES * num_programs // num_kv_heads)
    rows_of_a_tile = min(max_rows, LARGE_M // head_ratio + 1)
    return Capacity(
        rows=max_rows,
        entries=max_rows * (levels + 1),
        tiles=private_blocks + levels * blocks + splits,
        partials=max_rows * (levels + 1) + splits * rows_of_a_tile,
    )


class _Parts(NamedTuple):
    """What does not change while the segments and the number of rows stay."""

    segments: tuple[Segment, ...]
    num_rows: int
    private_start: NDArray[np.int64]
    begin: NDArray[np.int64]  # first token of each part
    segment_end: NDArray[np.int64]
    width: NDArray[np.int64]  # rows of each part
    first_entry: NDArray[np.int64]
    entry_row: NDArray[np.int64]
    entry_part: NDArray[np.int64]
    by_row: NDArray[np.int64]  # entries ordered by row, then position
    row_bounds: NDArray[np.int64]  # where each row's entries end, in that order


class WorkListPlanner:
    """Makes work lists for one kernel geometry.

    `head_ratio` is query heads per KV head, `num_programs` the fixed size of the
    launch. Remembers what it derived from the last segments, which change rarely.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        head_ratio: int,
        num_kv_heads: int,
        num_programs: int,
    ) -> None:
        self.capacity = capacity
        self._head_ratio = head_ratio
        self._num_kv_heads = num_kv_heads
        self._num_items = WAVES * num_programs
        self._parts: _Parts | None = None

    def fill(self, layout: StepLayout, into: WorkList) -> int:
        """Write the work of `layout`; returns the number of tiles.

        Raises FieldError if the layout is not valid or needs more than the capacity.
        """
        parts = self._parts_of(layout)
        seq_lens = np.array(layout.seq_lens, np.int64)
        if np.any(seq_lens < parts.private_start):
            row = int(np.argmax(seq_lens < parts.private_start))
            accepted = f"at least {parts.private_start[row]}, the row's shared tokens"
            raise FieldError(f"seq_lens[{row}]", int(seq_lens[row]), accepted)
        end = np.concatenate([parts.segment_end, seq_lens])
        length = end - parts.begin
        packed = parts.width * self._head_ratio
        is_large = packed > SMALL_M
        blocks = np.where(is_large, -(-packed // LARGE_M), 1)
        split_keys, splits = self._split(length, blocks, parts)
        self._fill_entries(parts, splits, into)
        return _fill_tiles(parts, end, split_keys, splits, blocks, is_large, into)

    def _parts_of(self, layout: StepLayout) -> _Parts:
        parts, rows = self._parts, len(layout.seq_lens)
        if parts is None or (parts.segments, parts.num_rows) != (layout.segments, rows):
            check_layout(layout)
            parts = self._parts = _derive_parts(layout)
            self._check("rows of seq_lens", rows, self.capacity.rows)
            self._check("rows of segments", len(parts.entry_row), self.capacity.entries)
        return parts

    def _check(self, field: str, needed: int, available: int) -> None:
        if needed > available:
            raise FieldError(field, needed, f"at most {available}, the buffer's size")

    def _split(
        self, length: NDArray[np.int64], blocks: NDArray[np.int64], parts: _Parts
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys per split and number of splits of each part."""
        work = int((length * blocks).sum()) * self._num_kv_heads
        chunk = max(MIN_SPLIT_KEYS, int(_round_up(-(-work // self._num_items))))
        longest = int(length.max(initial=0))
        while True:
            pieces = np.maximum(-(-length // chunk), 1)
            keys = np.maximum(_round_up(-(-length // pieces)), SPLIT_GRANULE)
            splits = -(-length // keys)
            tiles = int((splits * blocks).sum())
            partials = int((splits * parts.width).sum())
            fits = tiles <= self.capacity.tiles and partials <= self.capacity.partials
            if fits or chunk >= longest:
                break
            chunk *= 2
        self._check("tiles of segments", tiles, self.capacity.tiles)
        self._check("partials of segments", partials, self.capacity.partials)
        return keys, splits

    def _fill_entries(
        self, parts: _Parts, splits: NDArray[np.int64], into: WorkList
    ) -> None:
        count = len(parts.entry_row)
        ends = np.cumsum(splits[parts.entry_part[parts.by_row]])
        into.entry_row[:count] = parts.entry_row
        into.entry_slot[parts.by_row] = ends - splits[parts.entry_part[parts.by_row]]
        into.row_start[0] = 0
        into.row_start[1 : parts.num_rows + 1] = ends[parts.row_bounds - 1]
        into.row_start[parts.num_rows + 1 :] = ends[-1] if count else 0


def _round_up(keys: Any) -> Any:
    """An integer, or an array of them, to a multiple of the granule."""
    return -(-keys // SPLIT_GRANULE) * SPLIT_GRANULE


def _derive_parts(layout: StepLayout) -> _Parts:
    segments, rows = layout.segments, len(layout.seq_lens)
    starts = np.array(private_starts(layout), np.int64)
    width = np.array([len(s.rows) for s in segments] + [1] * rows, np.int64)
    begin = np.concatenate([np.array([s.start for s in segments], np.int64), starts])
    shared = [row for segment in segments for row in segment.rows]
    entry_row = np.array([*shared, *range(rows)], np.int64)
    entry_part = np.repeat(np.arange(len(width)), width)
    # a row's private part comes after segments that begin where it does, if empty
    is_private = entry_part >= len(segments)
    return _Parts(
        segments=segments,
        num_rows=rows,
        private_start=starts,
        begin=begin,
        segment_end=np.array([s.end for s in segments], np.int64),
        width=width,
        first_entry=np.cumsum(width) - width,
        entry_row=entry_row,
        entry_part=entry_part,
        by_row=np.lexsort((is_private, begin[entry_part], entry_row)),
        row_bounds=np.cumsum(np.bincount(entry_row, minlength=rows)),
    )


def _fill_tiles(
    parts: _Parts,
    end: NDArray[np.int64],
    split_keys: NDArray[np.int64],
    splits: NDArray[np.int64],
    blocks: NDArray[np.int64],
    is_large: NDArray[np.bool_],
    into: WorkList,
) -> int:
    """One tile per split and query block; long ones first, so that none ends late."""
    per_part = splits * blocks
    count = int(per_part.sum())
    part = np.repeat(np.arange(len(per_part)), per_part)
    index = np.arange(count) - np.repeat(np.cumsum(per_part) - per_part, per_part)
    split, block = np.divmod(index, blocks[part])
    first = parts.begin[part] + split * split_keys[part]
    last = np.minimum(first + split_keys[part], end[part])
    order = np.argsort(first - last, kind="stable")
    fields = (
        parts.first_entry[part],
        parts.width[part],
        block,
        first,
        last,
        split,
        is_large[part],
    )
    for column, values in enumerate(fields):
        into.tiles[:count, column] = values[order]
    into.num_tiles[0] = count
    return count
