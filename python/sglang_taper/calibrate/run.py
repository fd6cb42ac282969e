"""The course of a calibration: server, batches within the budget, profile, plot."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import requests
from tqdm import tqdm

from sglang_taper.calibrate.fit import Fit, fit_cells
from sglang_taper.calibrate.grid import make_grid, predicted_s
from sglang_taper.calibrate.options import CalibrateOptions
from sglang_taper.calibrate.partial import PartialResults
from sglang_taper.calibrate.plot import HINT, can_plot, plot_residuals
from sglang_taper.calibrate.session import STEPS_PER_CELL, Session
from sglang_taper.errors import FieldError, ServerProcessError
from sglang_taper.server_process import ServerProcess

# Each cell is shown again as long as there is time: what disturbs the first time is
# hardly there the second.
PASSES = 2
INTERRUPTED = 130
# Any will do: it only says that the server need not calibrate itself first.
PREFILL_KEYS = ("a_ms", "ms_per_token")
PLACEHOLDER = {"a_ms": 1.0, "b_ms_per_row": 0.0, "c_ms_per_token": 0.0}


def run_calibrate(options: CalibrateOptions) -> int:
    """Calibrate; returns 0, or 130 when interrupted (what was measured is kept).

    Prints to stdout, the progress to stderr. Raises FieldError, ServerProcessError.
    """
    if options.plot and not can_plot():
        raise FieldError("--plot", options.plot, HINT)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with nullcontext(options.url) if options.url else _server(options) as url:
            _calibrate(options, str(url).rstrip("/"))
    except KeyboardInterrupt:
        partial = options.partial_path
        goes_on = f"the same command goes on from {partial}"
        nothing = "nothing was measured yet"
        print(f"interrupted: {goes_on if partial.exists() else nothing}")
        return INTERRUPTED
    except requests.ConnectionError as error:
        where = options.url or "the server that was started"
        raise ServerProcessError(f"no server answers at {where}") from error
    except requests.RequestException as error:
        raise ServerProcessError(f"the server does not answer: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


@contextmanager
def _server(options: CalibrateOptions) -> Iterator[str]:
    """A server of our own, ended afterwards; its log stays if it failed."""
    print(f"Starting a server for {options.model_path}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
        json.dump(PLACEHOLDER, profile)
        profile.flush()
        flags = ["--latency-profile", profile.name, *options.server_flags]
        server = ServerProcess(options.model_path, flags)
        failed = False
        try:
            asyncio.run(server.ready(lambda line: print(line, flush=True)))
            yield server.url
        except requests.RequestException as error:
            failed = True
            reason = f"the server failed ({error}); its log is {server.log}"
            raise ServerProcessError(reason) from error
        finally:
            server.stop(keep_log=failed)


def _calibrate(options: CalibrateOptions, url: str) -> None:
    session = Session(url, options.api_key)
    partial = PartialResults(options.partial_path, session.subject)
    with session.undisturbed():
        num_left = _measure(session, partial, options.budget_s)
    fit = fit_cells(partial.cells, session.subject["graph_buckets"])
    profile = make_profile(fit, session.subject)
    Path(options.output).write_text(json.dumps(profile, indent=1) + "\n")
    for line in summary(fit, options.output):
        print(line)
    if num_left:
        print(f"{num_left} batches are left: the same command goes on with them")
    else:
        partial.remove()
    if can_plot():
        plot_residuals(fit.cells, title_of(session.subject, fit), options.plot_path)
        print(f"residuals: {options.plot_path}")
    else:
        print(f"no residual plot: {HINT}")


def _measure(session: Session, partial: PartialResults, budget_s: float) -> int:
    """Show cells, best first, for at most `budget_s`; returns how many are left."""
    grid = make_grid(session.limits, STEPS_PER_CELL)
    times = Counter(steps.cell for steps in partial.cells)
    showings = [(c, p) for p in range(PASSES) for c in grid if times[c] <= p]
    walls = [(steps.cell, steps.wall_s) for steps in partial.cells]
    ends_s, num_shown = time.monotonic() + budget_s, 0
    with tqdm(showings, unit="batch") as progress:
        for cell, number in progress:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                break
            if predicted_s(cell, walls) > left_s:
                continue
            progress.set_postfix_str(f"{cell.num_rows} x {cell.num_tokens} tokens")
            shown = session.measure(cell, number, left_s)
            walls.append((cell, shown.wall_s))
            if not shown.steps and shown.wall_s >= left_s:
                break  # cut before it told anything
            partial.add(shown)
            num_shown += 1
    return len(showings) - num_shown


def make_profile(fit: Fit, subject: dict[str, Any]) -> dict[str, Any]:
    """What `--latency-profile` reads; `calibration` says how it came about."""
    prefill = dict(zip(PREFILL_KEYS, fit.prefill_ms or (), strict=False))
    return {
        "a_ms": fit.a_ms,
        "b_ms_per_row": fit.b_ms_per_row,
        "c_ms_per_token": fit.c_ms_per_token,
        "shared_read_once": subject["shared_read_once"],
        "graph_buckets": subject["graph_buckets"],
        **({"prefill": prefill} if prefill else {}),
        "mape": fit.mape,
        "calibration": {
            **subject["engine"],
            "test_step_cost_ms": subject["test_step_cost_ms"],
            "num_steps": fit.num_steps,
            "mape_unseen_cells": fit.mape_unseen_cells,
            "cells": msgspec.to_builtins(fit.cells),
        },
    }


def summary(fit: Fit, output: str) -> list[str]:
    """What the user is told."""
    worst = max(fit.cells, key=lambda cell: abs(cell.residual))
    unseen = fit.mape_unseen_cells
    prefill = [fit.prefill_ms] if fit.prefill_ms else []
    lines = [
        f"T = {fit.a_ms:.4g} ms + {fit.b_ms_per_row:.4g} ms * rows "
        f"+ {1e3 * fit.c_ms_per_token:.4g} ms * thousand KV tokens",
        f"{fit.num_steps} steps of {len(fit.cells)} batches; MAPE {fit.mape:.1%} on "
        "steps held out" + (f", {unseen:.1%} on batches held out" if unseen else ""),
        *(
            f"prefill = {a:.4g} ms + {1e3 * b:.4g} ms * thousand tokens"
            for a, b in prefill
        ),
        f"worst batch: {worst.num_rows} x {worst.num_tokens} tokens, "
        f"measured {worst.measured_ms:.4g} ms, residual {worst.residual:+.1%}",
        f"profile: {output} (use it with --latency-profile)",
    ]
    return lines


def title_of(subject: dict[str, Any], fit: Fit) -> str:
    engine = subject["engine"]
    cost_ms = subject["test_step_cost_ms"]
    added = f", {cost_ms:g} ms added per step" if cost_ms else ""
    return (
        f"{engine['model']}, {engine['dtype']}, {engine['device']}{added}: "
        f"MAPE {fit.mape:.1%} on steps held out"
    )
