"""Which batches a calibration shows, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.calibrate.grid import NUM_FIRST, in_order, make_grid, predicted_s
from sglang_taper.probe import Cell, Limits

STEPS = 16

limits = st.builds(
    Limits,
    max_rows=st.integers(1, 600),
    max_tokens=st.integers(64, 1_000_000),
    vocab_size=st.just(1000),
    max_request_tokens=st.sampled_from([0, 512, 8192]),
)


@given(limits=limits)
def test_every_batch_fits_and_is_there_once(limits: Limits) -> None:
    grid = make_grid(limits, STEPS)
    assert len(set(grid)) == len(grid)
    for cell in grid:
        assert cell.num_rows <= limits.max_rows
        assert cell.num_rows * (cell.num_tokens + STEPS) <= limits.max_tokens // 2
        assert cell.num_tokens + STEPS <= (limits.max_request_tokens or 10**9)


@given(limits=limits)
def test_the_order_leaves_nothing_out(limits: Limits) -> None:
    grid = make_grid(limits, STEPS)
    assert set(in_order(grid)) == set(grid)
    assert in_order(grid) == in_order(grid[::-1])


def test_the_first_batches_are_cheap_and_tell_rows_from_context() -> None:
    grid = make_grid(Limits(64, 100_000, 1000), STEPS)
    first = grid[:NUM_FIRST]
    assert first[0] == Cell(1, 16)
    assert len({cell.num_rows for cell in first}) == 2
    assert len({cell.num_tokens for cell in first}) == 2
    assert max(cell.prompt_tokens for cell in first) < 500


def test_many_rows_and_long_contexts_come_before_what_lies_between() -> None:
    grid = make_grid(Limits(64, 100_000, 1000), STEPS)
    early = grid[: NUM_FIRST + 3]
    assert max(cell.num_tokens for cell in early) == 16384
    assert max(cell.num_rows for cell in early) >= 48


def test_nothing_fits_into_a_pool_that_is_too_small() -> None:
    assert make_grid(Limits(8, 40, 1000), STEPS) == []


def test_the_time_of_a_batch_is_predicted_from_the_others() -> None:
    def wall_s(cell: Cell) -> float:
        return 0.5 + 0.02 * cell.num_rows + 0.001 * cell.prompt_tokens

    shown = [(c, wall_s(c)) for c in (Cell(1, 16), Cell(8, 16), Cell(1, 256))]
    large = Cell(32, 1024)
    assert predicted_s(large, shown) == pytest.approx(wall_s(large), rel=0.01)
    assert predicted_s(large, shown[:2]) == 0
