"""Coefficients and errors of a profile, from steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_server import law

from sglang_taper.calibrate.fit import CellSteps, TimedStep, fit_cells
from sglang_taper.errors import FieldError
from sglang_taper.policy.latency import bucket_rows
from sglang_taper.probe import Cell

GRID = [Cell(rows, tokens) for rows in (1, 4, 16) for tokens in (16, 256, 1024)]


def shown(
    cell: Cell, step_ms: Callable[[int, int], float] = law, count: int = 14
) -> CellSteps:
    steps = []
    for index in range(1, count + 1):
        kv_tokens = cell.num_rows * (cell.num_tokens + index)
        time_ms = step_ms(cell.num_rows, kv_tokens)
        steps.append(TimedStep(cell.num_rows, kv_tokens, time_ms))
    return CellSteps(cell, 1.0, steps)


def test_steps_that_follow_the_law_give_its_coefficients_and_no_error() -> None:
    fit = fit_cells([shown(cell) for cell in GRID])
    found = (fit.a_ms, fit.b_ms_per_row, fit.c_ms_per_token)
    assert found == pytest.approx((20, 1.5, 0.01), rel=1e-4)
    assert fit.mape < 1e-4
    assert fit.mape_unseen_cells is not None
    assert fit.mape_unseen_cells < 1e-3
    assert fit.num_steps == 14 * len(GRID)


def test_compilation_collection_and_neighbours_do_not_poison_the_fit() -> None:
    rng = random.Random(1)

    def disturbed(rows: int, kv_tokens: int) -> float:
        factor = rng.choice((3.0, 10.0, 200.0)) if rng.random() < 0.1 else 1.0
        return law(rows, kv_tokens) * rng.uniform(0.98, 1.02) * factor

    fit = fit_cells([shown(cell, disturbed) for cell in GRID])
    for cell in fit.cells:
        expected = law(cell.num_rows, int(cell.kv_tokens))
        assert cell.predicted_ms == pytest.approx(expected, rel=0.02)
        assert abs(cell.residual) < 0.05
    assert sum(cell.num_outliers for cell in fit.cells) > 5


def test_a_whole_batch_that_was_disturbed_moves_the_others_little() -> None:
    slow = [shown(cell) for cell in GRID]
    slow[4] = shown(GRID[4], lambda rows, tokens: 4 * law(rows, tokens))
    fit = fit_cells(slow)
    by_cell = {(c.num_rows, c.num_tokens): c for c in fit.cells}
    disturbed = by_cell.pop((GRID[4].num_rows, GRID[4].num_tokens))
    assert disturbed.residual == pytest.approx(-0.75, abs=0.01)
    assert all(abs(cell.residual) < 0.01 for cell in by_cell.values())


def test_what_no_line_describes_shows_up_as_residual_and_error() -> None:
    fit = fit_cells([shown(c, lambda r, t: 20 + 0.2 * r * r) for c in GRID])
    residuals = [cell.residual for cell in fit.cells]
    assert min(residuals) < -0.05
    assert max(residuals) > 0.05
    assert fit.mape > 0.03


def test_the_error_is_that_of_steps_that_were_not_fitted() -> None:
    """Every third step of each batch is special, and only those are held out."""
    count = 0

    def odd(rows: int, kv_tokens: int) -> float:
        nonlocal count
        count += 1
        return law(rows, kv_tokens) * (1.25 if count % 3 == 0 else 1.0)

    fit = fit_cells([shown(cell, odd, count=12) for cell in GRID])
    assert fit.mape == pytest.approx(0.2, abs=0.001)


def test_a_batch_of_a_kind_not_seen_is_judged_apart() -> None:
    """Beyond 8 rows a step costs twice as much, which no other batch tells."""
    cells = [Cell(rows, 16) for rows in (1, 2, 4, 8, 64)]
    fit = fit_cells([shown(c, lambda r, t: law(r + (r > 8) * r, t)) for c in cells])
    assert fit.mape_unseen_cells is not None
    assert fit.mape_unseen_cells > 2 * fit.mape > 0.05


def test_rows_are_rounded_to_captured_sizes() -> None:
    buckets = (1, 8, 16)
    cells = [Cell(rows, tokens) for rows in (1, 3, 6, 9, 16) for tokens in (16, 512)]
    fit = fit_cells(
        [shown(c, lambda r, t: law(bucket_rows(r, buckets), t)) for c in cells],
        buckets,
    )
    assert fit.mape < 1e-4


def test_a_batch_shown_twice_counts_as_one() -> None:
    fit = fit_cells([*(shown(cell) for cell in GRID), shown(GRID[0])])
    assert len(fit.cells) == len(GRID)
    assert fit.cells[0].num_steps == 28


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(FieldError, match="timed steps=3 is not valid: at least 16"):
        fit_cells([shown(GRID[0], count=3)])
