"""Which rows of a decode step share which KV slots: plain integers, no tensors.

A layout is a list of segments; it describes a tree of any depth, several trees, or
none. Every backend builds its plan from it, so it is checked in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from sglang_taper.errors import FieldError


class Segment(msgspec.Struct, frozen=True):
    """Rows of the step whose tokens `[start, end)` lie in the same KV slots."""

    rows: tuple[int, ...]
    start: int
    end: int


class StepLayout(msgspec.Struct, frozen=True):
    """What the rows of one step share.

    For each row its segments tile `[0, private_start)` in the order of the list; tokens
    `[private_start, seq_len)` are its own. Rows in no segment share nothing. A row of
    length 0 is padding: output 0, log-sum-exp minus infinity.
    """

    segments: tuple[Segment, ...]
    seq_lens: tuple[int, ...]


def private_starts(layout: StepLayout) -> list[int]:
    """Tokens of each row that lie in its segments."""
    starts = [0] * len(layout.seq_lens)
    for segment in layout.segments:
        for row in segment.rows:
            starts[row] = segment.end
    return starts


def check_layout(layout: StepLayout) -> None:
    """Raise FieldError unless the segments of every row tile a prefix of it."""
    ends = [0] * len(layout.seq_lens)
    for index, segment in enumerate(layout.segments):
        name = f"segments[{index}]"
        _check_rows(f"{name}.rows", segment.rows, len(ends))
        if segment.end < segment.start:
            raise FieldError(f"{name}.end", segment.end, f"at least {segment.start}")
        for row in segment.rows:
            if segment.start != ends[row]:
                accepted = f"{ends[row]}, where the last segment of row {row} ends"
                raise FieldError(f"{name}.start", segment.start, accepted)
            if segment.end > layout.seq_lens[row]:
                accepted = f"at most {layout.seq_lens[row]}, the length of row {row}"
                raise FieldError(f"{name}.end", segment.end, accepted)
            ends[row] = segment.end


def _check_rows(name: str, rows: tuple[int, ...], num_rows: int) -> None:
    if not rows or len(set(rows)) != len(rows):
        raise FieldError(name, rows, "one or more different rows")
    if min(rows) < 0 or max(rows) >= num_rows:
        raise FieldError(name, rows, f"rows of the step, 0 to {num_rows - 1}")


def segments_of(
    rows: Sequence[int], common: Sequence[int], min_tokens: int
) -> list[Segment]:
    """The tree of segments of rows that are sorted by their slots.

    `common[i]` is how many leading slots `rows[i]` and `rows[i + 1]` have in common.
    No segment is shorter than `min_tokens` (at least 1): what is shared beyond the last
    one is left to the rows. Parents come before their children; rows ascend.
    """
    return list(_tree(rows, common, 0, min_tokens))


def _tree(
    rows: Sequence[int], common: Sequence[int], start: int, min_tokens: int
) -> Iterator[Segment]:
    begin = 0
    for index in range(len(rows)):
        if index < len(common) and common[index] >= start + min_tokens:
            continue
        inside = common[begin:index]
        if inside:
            members = rows[begin : index + 1]
            yield Segment(tuple(sorted(members)), start, min(inside))
            yield from _tree(members, inside, min(inside), min_tokens)
        begin = index + 1
