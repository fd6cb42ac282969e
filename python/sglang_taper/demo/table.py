"""The facts as tables: rich ones on a terminal, aligned plain text anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Facts = Mapping[str, Any]
Row = tuple[str, list[str]]

BARS = "▁▂▃▄▅▆▇█"
NOTHING = "-"


def print_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Row]
) -> None:
    """Print `rows`; the first column is the name of the fact."""
    if not console.is_terminal:
        print(plain_table(title, header, rows), file=console.file, flush=True)
        return
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Row]) -> str:
    """The table as text, every column as wide as its widest cell."""
    lines = [list(header), *([name, *cells] for name, cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join(["", title, rule, text[0], rule, *text[1:], rule])


def policy_rows(policies: Mapping[str, Facts]) -> list[Row]:
    """One row for each fact, one cell for each policy."""
    columns = list(policies.values())
    return [(name, [cell(facts) for facts in columns]) for name, cell in _POLICY_CELLS]


def program_rows(facts: Facts) -> list[Row]:
    """The facts of the forking program, one cell each."""
    return [(name, [cell(facts)]) for name, cell in _PROGRAM_CELLS]


def sparkline(values: Sequence[float]) -> str:
    """One bar for each value, from 0 to the largest."""
    top = max(values, default=0)
    if top <= 0:
        return BARS[0] * len(values) or NOTHING
    return "".join(BARS[round(v / top * (len(BARS) - 1))] for v in values)


def _number(key: str, digits: int = 1) -> Callable[[Facts], str]:
    def cell(facts: Facts) -> str:
        value = facts[key]
        return NOTHING if value is None else f"{value:.{digits}f}"

    return cell


def _percent(key: str, digits: int = 0) -> Callable[[Facts], str]:
    def cell(facts: Facts) -> str:
        value = facts[key]
        return NOTHING if value is None else f"{100 * value:.{digits}f} %"

    return cell


def _mean_and_max(key: str) -> Callable[[Facts], str]:
    def cell(facts: Facts) -> str:
        value = facts[key]
        return NOTHING if value is None else f"{value['mean']:.0f} / {value['max']:.0f}"

    return cell


def _prediction(facts: Facts) -> str:
    if facts["predicted_ms"] is None:
        return NOTHING
    return f"{facts['predicted_ms']:.1f} / {facts['measured_ms']:.1f}"


def _tokens(facts: Facts) -> str:
    shared, again = facts["num_prefix_shared_tokens"], facts["num_recomputed_tokens"]
    return f"{shared} / {again}"


def _against(key: str, slo: str) -> Callable[[Facts], str]:
    def cell(facts: Facts) -> str:
        return f"{facts[key]:.0f} ({facts['slo'][slo]:.0f})"

    return cell


def _span(key: str) -> Callable[[Facts], str]:
    def cell(facts: Facts) -> str:
        values = facts[key]
        return f"{sparkline(values)} up to {max(values):.0f}" if values else NOTHING

    return cell


_PREDICTION = "step predicted / measured ms"
_ERROR = "step prediction error (MAPE)"
_TOKENS = "prefix tokens shared / recomputed"

_POLICY_CELLS: list[tuple[str, Callable[[Facts], str]]] = [
    (
        "serial requests within SLO",
        lambda f: f"{f['num_serial_good']} of {f['num_serial']}",
    ),
    ("SLO attainment", _percent("slo_attainment")),
    ("SLO attainment, critical path", _percent("slo_attainment_critical")),
    ("serial TPOT mean / worst ms", _mean_and_max("serial_tpot_ms")),
    ("forked TPOT mean / worst ms", _mean_and_max("forked_tpot_ms")),
    (
        "forked TPOT, critical path",
        _mean_and_max("forked_tpot_critical_ms"),
    ),
    ("TTFT mean / worst ms", _mean_and_max("ttft_ms")),
    ("token goodput tok/s", _number("token_goodput")),
    ("request goodput req/s", _number("request_goodput", 2)),
    ("all tokens tok/s", _number("output_throughput")),
    ("wall time s", _number("duration_s")),
    ("mean width of a fork", _number("mean_width", 2)),
    ("rows deferred", lambda f: str(f["num_rows_deferred"])),
    (_PREDICTION, _prediction),
    (_ERROR, _percent("mape", 1)),
    (_TOKENS, _tokens),
]

_PROGRAM_CELLS: list[tuple[str, Callable[[Facts], str]]] = [
    ("policy", lambda f: str(f["policy"])),
    ("width over time", _span("width_over_time")),
    ("mean width of the fork", _number("mean_width", 2)),
    ("rows deferred", lambda f: str(f["num_rows_deferred"])),
    (_PREDICTION, _prediction),
    (_ERROR, _percent("mape", 1)),
    ("program TTFT ms (SLO)", _against("program_ttft_ms", "ttft_ms")),
    ("program TPOT ms (SLO)", _against("program_tpot", "tpot_ms")),
    ("program TPOT, critical path", _number("program_tpot_critical", 0)),
    ("serial TTFT mean / worst ms", _mean_and_max("serial_ttft_ms")),
    ("serial TPOT mean / worst ms", _mean_and_max("serial_tpot_ms")),
    (
        "serial requests within SLO",
        lambda f: f"{f['num_serial_good']} of {f['num_serial']}",
    ),
    (_TOKENS, _tokens),
]
