"""PNG figures of results, with matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from goodput_lib.rescoring import goodput_over_tpot, has_details
from goodput_lib.tables import Result, by_policy
from sglang_taper.errors import TaperError

Figure = Callable[[Any, Sequence[Result]], bool]
SIZE_INCHES, DPI = (7.0, 4.2), 130


class NoMatplotlib(TaperError):
    """Figures were asked for and cannot be drawn."""


def draw_all(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw what `results` have the data for; returns the files written.

    Creates `folder`. Raises NoMatplotlib where it is not installed.
    """
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in FIGURES.items():
        figure, axes = pyplot.subplots(figsize=SIZE_INCHES)
        if draw(axes, results):
            figure.tight_layout()
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=DPI)
            written.append(path)
        pyplot.close(figure)
    return written


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise NoMatplotlib(
            "figures need matplotlib: pip install 'sglang-taper[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def over_slo(axes: Any, results: Sequence[Result]) -> bool:
    """Token goodput over the TPOT target: measured ones, and lines where requests are
    at hand that any target can be scored with."""
    closed = [result for result in results if result["request_rate"] is None]
    policies = by_policy(closed)
    for name, runs in policies.items():
        (line,) = axes.plot([], [], label=name)
        lines = goodput_over_tpot([run for run in runs if has_details(run)])
        if lines:
            axes.plot(*lines, color=line.get_color(), linewidth=1)
        points = _means(runs, lambda run: run["goodput_slos_ms"].get("tpot"))
        axes.plot(
            list(points), list(points.values()), "o", color=line.get_color(), ms=4
        )
    _label(axes, "TPOT target, ms", "token goodput, tok/s")
    return bool(policies)


def over_load(axes: Any, results: Sequence[Result]) -> bool:
    """Attainment over the rate of an open loop."""
    opened = [result for result in results if result["request_rate"] is not None]
    for name, runs in by_policy(opened).items():
        points = _means(runs, lambda run: run["request_rate"], "slo_attainment")
        axes.plot(list(points), list(points.values()), marker="o", ms=4, label=name)
    axes.axhline(0.95, color="grey", linewidth=0.8, linestyle=":")
    _label(axes, "requests per second", "SLO attainment")
    return bool(opened)


def width_over_time(axes: Any, results: Sequence[Result]) -> bool:
    """Rows per decode step through the first round of each policy."""
    first = [r for r in results if r["round"] == 0 and r["engine"]]
    for name, runs in by_policy(first).items():
        rows = runs[0]["engine"]["rows_over_time"]
        axes.plot([i / len(rows) for i in range(len(rows))], rows, label=name)
    _label(axes, "share of the run's decode steps", "rows per step")
    return bool(first)


def predicted_against_measured(axes: Any, results: Sequence[Result]) -> bool:
    """Step times, for policies that predict."""
    found = False
    for name, runs in by_policy(results).items():
        pairs = [
            pair
            for run in runs
            for pair in (run["engine"] or {}).get("step_pairs_ms", ())
        ]
        if pairs:
            found = True
            axes.plot(*zip(*pairs, strict=True), ".", ms=2, alpha=0.4, label=name)
    if found:
        # Single steps in which the machine did something else would hide the rest.
        top = max(axes.get_xlim()[1], 1.0)
        axes.plot([0, top], [0, top], color="grey", linewidth=0.8)
        axes.set_ylim(0, 2 * top)
    _label(axes, "predicted step, ms", "measured step, ms")
    return found


FIGURES: Mapping[str, Figure] = {
    "goodput_over_slo": over_slo,
    "attainment_over_load": over_load,
    "width_over_time": width_over_time,
    "predicted_against_measured": predicted_against_measured,
}


def _means(
    runs: Sequence[Result],
    place: Callable[[Result], float | None],
    key: str = "token_goodput",
) -> dict[float, float]:
    """Ascending place -> mean over rounds."""
    at: dict[float, list[float]] = {}
    for run in runs:
        where = place(run)
        if where is not None:
            at.setdefault(where, []).append(run[key])
    return {where: fmean(at[where]) for where in sorted(at)}


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
