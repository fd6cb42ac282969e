"""What the timings mean for the gate, and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_taper.policy.attention_fit import AttentionTiming, fit_constants
from sglang_taper.policy.attention_gate import (
    AttentionConstants,
    AttentionMode,
    LayerShape,
    SharedSegment,
    StepShape,
    constants_to_profile,
    decide,
)
from shared_prefix.steps import Cell, Heads

# Packed queries per tile of each way to read a prefix once.
TILE_ROWS = {"cascade 64": 64, "cascade 128": 128, "triton": 64}
# A gated step may be this much slower than plain in no cell.
MAX_LOSS = 0.03


def step_shape(cell: Cell) -> StepShape:
    segments = cell.layout.segments
    shared = [SharedSegment(len(s.rows), s.end - s.start) for s in segments]
    return StepShape(tuple(shared), len(cell.layout.seq_lens), _private(cell))


def _private(cell: Cell) -> int:
    covered = sum(len(s.rows) * s.end for s in cell.layout.segments)
    return sum(cell.layout.seq_lens) - covered


def gate_report(
    heads: Heads, name: str, cells: Sequence[tuple[Cell, float, float]]
) -> dict[str, Any]:
    """Constants fitted to (cell, plain us, shared us), and what the gate makes of them.

    `max_loss` is how much slower than plain the worst gated cell is, as a share of
    plain; `missed` how much time cells lose that stay plain although sharing is faster.
    """
    ratio = heads.num_q // heads.num_kv
    shape = LayerShape(heads.num_kv, ratio, heads.dim, tile_rows=TILE_ROWS[name])
    timings = [AttentionTiming(step_shape(c), p, s) for c, p, s in cells]
    constants = fit_constants(timings, shape)
    modes = [decide(constants, shape, timing.step).mode for timing in timings]
    gains = [1 - shared / plain for _, plain, shared in cells]
    shares = [mode is AttentionMode.CASCADE for mode in modes]
    pairs = list(zip(gains, shares, strict=True))
    return {
        "heads": heads.label,
        "name": name,
        "tile_rows": shape.tile_rows,
        "constants": constants_to_profile(constants),
        "modes": {c.label: str(m) for (c, *_), m in zip(cells, modes, strict=True)},
        "max_loss": max([0.0, *(-gain for gain, chosen in pairs if chosen)]),
        "missed": max([0.0, *(gain for gain, chosen in pairs if not chosen)]),
    }


def gate_profile(
    device: str, reports: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What a server needs of them, as `measured_from_profile` reads it."""
    keys = ("heads", "name", "tile_rows", "constants")
    return [{"device": device} | {key: r[key] for key in keys} for r in reports]


def to_markdown(results: Mapping[str, Any]) -> str:
    """The tables of a run; parts that have not happened are left out."""
    title = f"{results['device']}, torch {results['torch']}, commit {results['commit']}"
    lines = [title, ""]
    lines += _timing_table(results["cells"])
    lines += _launch_table(results["launch_shapes"])
    lines += [_gate_line(report) for report in results.get("gate", [])]
    for where, reason in results.get("unavailable", {}).items():
        lines.append(f"- not measured: {where}: {reason}")
    lines += [f"- FAILED: {failure}" for failure in results.get("failures", [])]
    return "\n".join(lines) + "\n"


def _timing_table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    if not cells:
        return []
    names = list(dict.fromkeys(name for cell in cells for name in cell["us"]))
    head = ["heads", "groups x width", *names, "best gain"]
    rows = []
    for cell in cells:
        times = cell["us"]
        plain = [us for name, us in times.items() if name.startswith("plain")]
        shared = [us for name, us in times.items() if not name.startswith("plain")]
        gain = f"{min(plain) / min(shared):.2f}x" if plain and shared else ""
        shown = [f"{times[n]:.1f}" if n in times else "" for n in names]
        rows.append([cell["heads"], cell["cell"], *shown, gain])
    return ["Microseconds per layer, bf16, median:", "", *_table(head, rows), ""]


def _launch_table(shapes: Sequence[Mapping[str, Any]]) -> list[str]:
    if not shapes:
        return []
    head = ["keys", "warps", "stages", "programs per SM", *shapes[0]["us"]]
    rows = []
    for shape in shapes:
        times = [f"{us:.1f}" for us in shape["us"].values()]
        rows.append([*map(str, shape["config"]), *times])
    return ["Launch shapes of the Triton kernel:", "", *_table(head, rows), ""]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _gate_line(report: Mapping[str, Any]) -> str:
    constants = AttentionConstants(**report["constants"])
    return (
        f"- gate, {report['heads']}, {report['name']}: "
        f"{constants.dram_bytes_per_us / 1e6:.2f} TB/s from memory, "
        f"{constants.cached_bytes_per_us / 1e6:.2f} TB/s cached, "
        f"{constants.flop_per_us / 1e6:.0f} TFLOP/s, base {constants.base_us:.1f} us, "
        f"extra {constants.extra_us:.1f} us, {constants.extra_us_per_row:.3f} a row; "
        f"error {constants.error:.1%}; at most {report['max_loss']:.1%} slower than "
        f"plain, {report['missed']:.1%} missed"
    )
