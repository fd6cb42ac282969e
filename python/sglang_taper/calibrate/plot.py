"""The residual plot. Needs matplotlib, which only the extra `bench` installs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_taper.calibrate.fit import CellResidual

HINT = "matplotlib is missing: pip install 'sglang-taper[bench]'"


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def plot_residuals(cells: Sequence[CellResidual], title: str, path: Path) -> None:
    """Write a PNG: predicted against measured, and the residual of each cell."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    against, residuals = figure.subplots(1, 2)
    _plot_against(against, cells)
    _plot_residuals(residuals, cells, figure)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)


def _plot_against(axes: Any, cells: Sequence[CellResidual]) -> None:
    measured = [cell.measured_ms for cell in cells]
    axes.plot(measured, [cell.predicted_ms for cell in cells], "o", markersize=4)
    ends = [min(measured), max(measured)]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.set(xlabel="measured step (ms)", ylabel="predicted step (ms)")


def _plot_residuals(axes: Any, cells: Sequence[CellResidual], figure: Any) -> None:
    points = axes.scatter(
        [cell.num_tokens for cell in cells],
        [100 * cell.residual for cell in cells],
        c=[cell.num_rows for cell in cells],
        norm="log",
    )
    axes.set_xscale("log")
    axes.axhline(0, color="k", linewidth=0.8)
    axes.set(xlabel="prompt tokens per row", ylabel="residual (% of measured)")
    figure.colorbar(points, ax=axes, label="rows")
