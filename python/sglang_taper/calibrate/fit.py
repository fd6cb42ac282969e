"""From timed steps to a profile's coefficients, and how well they predict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.policy.latency import bucket_rows
from sglang_taper.policy.latency_fit import (
    Sample,
    Vector,
    dot,
    fit_prefill,
    robust_fit,
    sample_of,
)
from sglang_taper.probe import Cell

MIN_STEPS = 16
# Every third step of a cell is not fitted when the fit is judged.
HELD_OUT_EVERY = 3
# A step that takes so many times the median of its cell was disturbed (a compilation,
# garbage collection, another process). Reported; the fit leaves out its own.
OUTLIER_RATIO = 1.5


class TimedStep(msgspec.Struct, frozen=True):
    """A decode step of `num_rows` rows that read `kv_tokens`."""

    num_rows: int
    kv_tokens: int
    step_ms: float


class TimedPrefill(msgspec.Struct, frozen=True):
    """A prefill pass over `num_tokens` new tokens."""

    num_tokens: int
    pass_ms: float


class CellSteps(msgspec.Struct, frozen=True):
    """The steps and prefills timed while a cell was shown, which took `wall_s`."""

    cell: Cell
    wall_s: float
    steps: list[TimedStep]
    prefills: list[TimedPrefill] = []


class CellResidual(msgspec.Struct, frozen=True):
    """How well a cell is predicted: `residual` is (predicted - measured) / measured of
    the median step, `mape` the mean absolute one of all its steps."""

    num_rows: int
    num_tokens: int
    num_steps: int
    num_outliers: int
    kv_tokens: float
    measured_ms: float
    predicted_ms: float
    residual: float
    mape: float


class Fit(msgspec.Struct, frozen=True):
    """`mape` is over steps that were not fitted, `mape_unseen_cells` over cells none of
    whose steps was (None with fewer than four). `prefill_ms` is what a prefill pass
    costs, a fixed part and one for each new token; None after too few."""

    a_ms: float
    b_ms_per_row: float
    c_ms_per_token: float
    num_steps: int
    mape: float
    mape_unseen_cells: float | None
    prefill_ms: tuple[float, float] | None
    cells: list[CellResidual]


def fit_cells(cells: Sequence[CellSteps], graph_buckets: Sequence[int] = ()) -> Fit:
    """Fit all steps; judge by fits of fewer. Raises FieldError for too few steps."""
    by_cell = _by_cell(cells)
    samples = {c: _samples(steps, graph_buckets) for c, steps in by_cell.items()}
    everything = [s for some in samples.values() for s in some]
    if len(everything) < MIN_STEPS:
        accepted = f"at least {MIN_STEPS}: raise --budget-s"
        raise FieldError("timed steps", len(everything), accepted)
    fitted = robust_fit(everything)
    residuals = [
        _residual(cell, steps, samples[cell], fitted) for cell, steps in by_cell.items()
    ]
    return Fit(
        a_ms=fitted[0],
        b_ms_per_row=fitted[1],
        c_ms_per_token=fitted[2],
        num_steps=len(everything),
        mape=_held_out_mape(list(samples.values())),
        mape_unseen_cells=_unseen_mape(list(samples.values())),
        prefill_ms=fit_prefill(
            [(p.num_tokens, p.pass_ms) for shown in cells for p in shown.prefills]
        ),
        cells=sorted(residuals, key=lambda r: (r.num_rows, r.num_tokens)),
    )


def _by_cell(cells: Sequence[CellSteps]) -> dict[Cell, list[TimedStep]]:
    by_cell: dict[Cell, list[TimedStep]] = {}
    for shown in cells:
        if shown.steps:
            by_cell.setdefault(shown.cell, []).extend(shown.steps)
    return by_cell


def _samples(steps: Sequence[TimedStep], buckets: Sequence[int]) -> list[Sample]:
    return [
        sample_of(bucket_rows(step.num_rows, buckets), step.kv_tokens, step.step_ms)
        for step in steps
    ]


def _errors(fitted: Vector, samples: Sequence[Sample]) -> list[float]:
    """(predicted - measured) / measured of each."""
    return [dot(fitted, sample) - 1 for sample in samples]


def _mape(fitted: Vector, samples: Sequence[Sample]) -> float:
    return fmean(map(abs, _errors(fitted, samples)))


def _held_out_mape(cells: list[list[Sample]]) -> float:
    indexed = [pair for samples in cells for pair in enumerate(samples, 1)]
    held_out = [s for index, s in indexed if index % HELD_OUT_EVERY == 0]
    others = [s for index, s in indexed if index % HELD_OUT_EVERY]
    return _mape(robust_fit(others), held_out or others)


def _unseen_mape(cells: list[list[Sample]]) -> float | None:
    if len(cells) <= HELD_OUT_EVERY:
        return None
    errors = []
    for position, unseen in enumerate(cells):
        others = [*cells[:position], *cells[position + 1 :]]
        errors.append(_mape(robust_fit([s for some in others for s in some]), unseen))
    return fmean(errors)


def _residual(
    cell: Cell, steps: list[TimedStep], samples: list[Sample], fitted: Vector
) -> CellResidual:
    measured = median(step.step_ms for step in steps)
    errors = _errors(fitted, samples)
    # Of the same step, so that both are of the same context.
    middle = min(range(len(steps)), key=lambda i: abs(steps[i].step_ms - measured))
    return CellResidual(
        num_rows=cell.num_rows,
        num_tokens=cell.num_tokens,
        num_steps=len(steps),
        num_outliers=sum(s.step_ms > OUTLIER_RATIO * measured for s in steps),
        kv_tokens=fmean(step.kv_tokens for step in steps),
        measured_ms=steps[middle].step_ms,
        predicted_ms=steps[middle].step_ms * (1 + errors[middle]),
        residual=errors[middle],
        mape=fmean(map(abs, errors)),
    )
