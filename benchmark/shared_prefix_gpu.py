"""Shared-prefix decode attention on one GPU, in five minutes.

    python benchmark/shared_prefix_gpu.py --out results [--heads 32/8/128]

1. Correctness against float64: groups, trees, rows without a group, padding, empty
   slots. A way to attend that is wrong is left out of what follows.
2. CUDA graphs: one capture, 20 replays with other groupings, equal to eager runs.
3. Times of a layer, in a captured graph of several layers with a KV pool each: plain
   FlashInfer decode (fa2, fa3) against FlashInfer in two levels and our Triton kernel.
4. Launch shapes of the Triton kernel.
5. Constants of the attention gate, fitted, and what the gate would have lost with them.
   A server takes them with `--attention-profile results/attention_gate.json`; they hold
   for this device and the heads that were timed.

Exit codes: 0; 1 if anything was wrong or missing (only fa3 may be); 2 without a CUDA
device. Writes shared_prefix_gpu.json and .md after each part, and attention_gate.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shared_prefix.checks import check_correctness, check_replay, time_cell
from shared_prefix.contenders import LAUNCH_SHAPES, PLAIN, SHARED, Maker, triton
from shared_prefix.report import MAX_LOSS, gate_profile, gate_report, to_markdown
from shared_prefix.steps import Cell, Heads, make_step, relative_error

WIDE, ONE_KV_HEAD = Heads(64, 8, 128), Heads(8, 1, 128)
GRID = {
    WIDE: [
        *(Cell(8, 8, prefix, 128) for prefix in (256, 1024, 8192)),
        Cell(8, 8, 8192, 2048),
        *(Cell(32, 2, prefix, 128) for prefix in (1024, 8192)),
        *(Cell(1, 64, prefix, 256) for prefix in (1024, 8192, 32768)),
        *(Cell(64, 1, 0, private) for private in (128, 2048)),
    ],
    ONE_KV_HEAD: [
        *(Cell(4, 8, prefix, 128) for prefix in (512, 2048, 8192)),
        Cell(1, 32, 8192, 128),
        Cell(32, 1, 0, 2048),
    ],
}
LAUNCH_CELLS = [Cell(8, 8, 8192, 128), Cell(64, 1, 0, 2048)]
DEVICE = "cuda"
OPTIONAL = "plain fa3"
NO_DEVICE = """shared_prefix_gpu.py: no CUDA device here, so nothing can be measured.
Without one, test/ops runs the kernels in Triton's interpreter and compiles them."""
# Two 16-bit results may each be off by the tolerance.
AGREEMENT = 1e-2


class Session:
    """The results so far, written after every part."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(DEVICE)
        self.options = options
        self.grid = dict.fromkeys(options.heads, GRID[WIDE]) or GRID
        self.left_out: set[str] = set()
        self.results: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": _commit(),
            "scattered": options.scattered,
            "correctness": {},
            "cells": [],
            "launch_shapes": [],
            "gate": [],
            "unavailable": {},
            "failures": [],
        }

    def attempt(self, name: str, part: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, or None: then `name` is left out from now on."""
        started, result, verdict = time.monotonic(), None, "ok"
        try:
            result = work()
        except Exception as problem:  # a wrong result, or a module that is not there
            verdict = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
            self.left_out.add(name)
            key = f"{name}, {part}"
            if name == OPTIONAL and not isinstance(problem, AssertionError):
                self.results["unavailable"][key] = verdict
            else:
                self.results["failures"].append(f"{key}: {verdict}")
        seconds = time.monotonic() - started
        print(f"{name}, {part}: {verdict} ({seconds:.1f} s)", flush=True)
        return result

    def ways(self, makers: Mapping[str, Maker]) -> dict[str, Maker]:
        """Those not left out."""
        return {k: v for k, v in makers.items() if k not in self.left_out}

    def write(self) -> None:
        out = Path(self.options.out)
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.results, indent=1)
        (out / "shared_prefix_gpu.json").write_text(text + "\n")
        (out / "shared_prefix_gpu.md").write_text(to_markdown(self.results))
        entries = gate_profile(self.results["device"], self.results["gate"])
        profile = json.dumps(entries, indent=1)
        (out / "attention_gate.json").write_text(profile + "\n")


def run_checks(session: Session) -> None:
    device = session.device
    for name, make in (PLAIN | SHARED).items():
        dtypes = [torch.bfloat16] + [torch.float32] * (name == "triton")
        for dtype in dtypes:
            errors = session.attempt(
                name,
                f"correctness in {dtype}",
                lambda make=make, dtype=dtype: check_correctness(
                    WIDE, device, dtype, make
                ),
            )
            session.results["correctness"][f"{name}, {dtype}"] = errors
    for name, make in session.ways(SHARED).items():
        session.attempt(
            name, "graph replay", lambda make=make: check_replay(WIDE, device, make)
        )


def run_cells(session: Session) -> None:
    for heads, cells in session.grid.items():
        for cell in cells[:: 3 if session.options.quick else 1]:
            record = {"heads": heads.label, "cell": cell.label, "us": {}}
            session.results["cells"].append(record)
            _time_ways(session, heads, cell, record["us"])
            session.write()


def _time_ways(
    session: Session, heads: Heads, cell: Cell, times: dict[str, float]
) -> None:
    options = session.options
    step = make_step(cell.layout, session.device, scattered=options.scattered)
    size = (step.rows, sum(cell.layout.seq_lens))
    expected: list[torch.Tensor] = []

    def measure(make: Maker) -> float:
        way = make(heads, torch.bfloat16, session.device, *size)
        us, out = time_cell(way, heads, step, options.layers, options.rounds)
        if expected and relative_error(out, expected[0]) > AGREEMENT:
            error = relative_error(out, expected[0])
            raise AssertionError(f"differs from plain by {error:.2e}")
        expected.append(out.clone())
        return us

    for name, make in session.ways(PLAIN | SHARED).items():
        part = f"{heads.label} {cell.label}"
        us = session.attempt(name, part, lambda make=make: measure(make))
        if us is not None:
            times[name] = us


def run_launch_shapes(session: Session) -> None:
    options = session.options
    for config in LAUNCH_SHAPES:
        shape = [config.key_block, config.num_warps, config.num_stages]
        shape.append(config.programs_per_sm)
        times: dict[str, float] = {}
        for cell in LAUNCH_CELLS:
            step = make_step(cell.layout, session.device, scattered=False)

            def measure(step: Any = step, config: Any = config) -> float:
                make = triton(config=config)
                way = make(WIDE, torch.bfloat16, session.device, step.rows, 0)
                return time_cell(way, WIDE, step, options.layers, options.rounds)[0]

            us = session.attempt(f"launch shape {shape}", cell.label, measure)
            times[cell.label] = us if us is not None else float("nan")
        session.results["launch_shapes"].append({"config": shape, "us": times})


def run_gate(session: Session) -> None:
    """Against plain fa2, as a server would run the step; else against plain Triton."""
    plain = "plain triton" if "plain fa2" in session.left_out else "plain fa2"
    for heads, cells in session.grid.items():
        measured = [
            (cell, record["us"])
            for cell in cells
            for record in session.results["cells"]
            if (record["heads"], record["cell"]) == (heads.label, cell.label)
        ]
        for name in session.ways(SHARED):
            pairs = [
                (cell, us[plain], us[name])
                for cell, us in measured
                if name in us and plain in us
            ]
            _fit_gate(session, heads, name, pairs)


def _fit_gate(
    session: Session, heads: Heads, name: str, pairs: Sequence[tuple[Cell, Any, float]]
) -> None:
    report = session.attempt(
        f"gate {heads.label} {name}",
        f"fit to {len(pairs)} cells",
        lambda: gate_report(heads, name, pairs),
    )
    if report is None:
        return
    session.results["gate"].append(report)
    if report["max_loss"] > MAX_LOSS:
        loss = f"{report['max_loss']:.1%} slower than plain"
        session.results["failures"].append(f"gate {heads.label} {name}: {loss}")


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def heads_of(text: str) -> Heads:
    """Of a text such as 64/8/128; ValueError if it is not one."""
    heads = Heads(*map(int, text.split("/")))
    if min(heads) < 1 or heads.num_q % heads.num_kv:
        raise ValueError(text)
    return heads


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=".", help="folder for the results")
    parser.add_argument(
        "--heads",
        type=heads_of,
        action="append",
        default=[],
        metavar="Q/KV/DIM",
        help="heads of a layer on one rank, to be timed instead of the grid's",
    )
    parser.add_argument("--quick", action="store_true", help="every third cell")
    parser.add_argument(
        "--scattered", action="store_true", help="permute the KV slots of timed steps"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers in a graph")
    parser.add_argument("--rounds", type=int, default=20, help="timings per cell")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 2
    session = Session(options)
    parts = (run_checks, run_cells, run_launch_shapes, run_gate)
    for part in parts:
        part(session)
        session.write()
    print(to_markdown(session.results))
    return 1 if session.results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
