"""A layout is checked before any backend relies on it."""

from __future__ import annotations

import pytest

from sglang_taper.errors import FieldError
from sglang_taper.ops.segments import (
    Segment,
    StepLayout,
    check_layout,
    private_starts,
)

TREE = StepLayout(
    segments=(
        Segment((0, 1, 2), 0, 10),
        Segment((0, 2), 10, 14),
        Segment((3, 4), 0, 5),
    ),
    seq_lens=(20, 11, 15, 6, 5, 7, 0),
)


def test_a_tree_of_segments_is_accepted_with_padding_and_rows_alone() -> None:
    check_layout(TREE)


def test_private_tokens_start_where_the_last_segment_of_a_row_ends() -> None:
    assert private_starts(TREE) == [14, 10, 14, 5, 5, 0, 0]


def test_rows_without_segments_are_private_from_the_start() -> None:
    assert private_starts(StepLayout((), (3, 4))) == [0, 0]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment((), 0, 4)], "one or more different rows"),
        ([Segment((0, 0), 0, 4)], "one or more different rows"),
        ([Segment((0, 2), 0, 4)], "rows of the step, 0 to 1"),
        ([Segment((-1, 0), 0, 4)], "rows of the step, 0 to 1"),
        ([Segment((0, 1), 0, 9)], "at most 8, the length of row 1"),
        ([Segment((0, 1), 1, 4)], "0, where the last segment of row 0 ends"),
        ([Segment((0, 1), 0, 4), Segment((1,), 3, 6)], "4, where the last segment"),
        ([Segment((0, 1), 0, 4), Segment((1,), 5, 6)], "4, where the last segment"),
        ([Segment((0, 1), 0, -1)], "at least 0"),
    ],
)
def test_a_layout_that_does_not_tile_its_rows_is_refused(
    segments: list[Segment], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        check_layout(StepLayout(tuple(segments), (10, 8)))
