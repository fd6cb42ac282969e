"""How well the step-latency model predicts steps that a server really ran.

    python benchmark/step_model.py record STEPS.jsonl [--url URL] [--duration-s S]
    python benchmark/step_model.py replay STEPS.jsonl

`record` appends every decode step a live server reports (`GET /taper/state`), one JSON
object a line, until the time is over or Ctrl-C. `replay` shows them in order to the
server's own model, which knows nothing at first, and prints how far its predictions,
each made before its step was seen, are off: mean and median, and the mean of the six
steps after the number of rows changed by more than 40 %; and, of each coefficient, the
range in which 96 % of its values are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from sglang_taper.policy.latency import MIN_SAMPLES, StepLatencyModel

KEYS = ("now_ms", "policy", "num_admitted", "kv_tokens", "predicted_ms", "measured_ms")
POLL_S = 2.0
CHANGE, NUM_AFTER_CHANGE = 1.4, 6
COEFFICIENTS = ("a_ms", "b_ms_per_row", "c_ms_per_token")


def record(url: str, file: Path, duration_s: float) -> None:
    """Append the steps of the server at `url` to `file`."""
    last_ms, end_s = 0.0, time.monotonic() + duration_s
    with file.open("a") as lines, contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end_s:
            answer = httpx.get(f"{url}/taper/state", timeout=60)
            state = answer.raise_for_status().json()
            done = [s for s in state["recent_steps"] if s["measured_ms"] is not None]
            for step in done:
                if step["now_ms"] > last_ms:
                    lines.write(json.dumps({key: step[key] for key in KEYS}) + "\n")
                    last_ms = step["now_ms"]
            lines.flush()
            time.sleep(POLL_S)


class Replay:
    """What a model that learns says to each step before it sees it."""

    def __init__(self, steps: Sequence[tuple[int, int, float]]) -> None:
        self.model = StepLatencyModel(shared_read_once=True)
        self.errors: list[float] = []
        self.errors_after_change: list[float] = []
        self.coefficients: dict[str, list[float]] = {key: [] for key in COEFFICIENTS}
        last_rows, left = steps[0][0], 0
        for rows, kv_tokens, step_ms in steps:
            changed = not 1 / CHANGE <= rows / last_rows <= CHANGE
            left = NUM_AFTER_CHANGE if changed else left - 1
            last_rows = rows
            self._see(rows, kv_tokens, step_ms, after_change=left > 0)

    def _see(
        self, rows: int, kv_tokens: int, step_ms: float, after_change: bool
    ) -> None:
        predicted_ms = self.model.predict(rows, kv_tokens)
        self.model.observe(rows, kv_tokens, step_ms)
        if not predicted_ms:
            return
        self.errors.append(abs(predicted_ms / step_ms - 1))
        if after_change:
            self.errors_after_change.append(self.errors[-1])
        profile: dict[str, Any] = self.model.to_profile()
        for key, values in self.coefficients.items():
            values.append(profile[key])

    def range_of(self, coefficient: str) -> tuple[float, float]:
        """The values of a coefficient but for the 2 % lowest and highest."""
        values = sorted(self.coefficients[coefficient])
        cut = len(values) // 50
        return values[cut], values[-1 - cut]


def read_steps(file: Path) -> list[tuple[int, int, float]]:
    """Rows, KV tokens and ms of each recorded step; exits if these are not enough."""
    try:
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        found = [(s["num_admitted"], s["kv_tokens"], s["measured_ms"]) for s in steps]
        if any(rows < 1 or tokens < 0 or not ms > 0 for rows, tokens, ms in found):
            raise ValueError("a step has rows, and takes time")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"step_model.py: error: {file}: no steps: {error!r}") from None
    if len(found) <= MIN_SAMPLES:
        few = f"{len(found)} steps, and a model needs more than {MIN_SAMPLES}"
        raise SystemExit(f"step_model.py: error: {file}: {few}")
    return found


def show(replay: Replay) -> None:
    errors, after = replay.errors, replay.errors_after_change
    print(f"{len(errors)} predictions, MAPE {fmean(errors):.1%}")
    changed = f"{fmean(after):.1%}" if after else "none"
    print(f"median {median(errors):.1%}, after a change of rows {changed}")
    print(f"{replay.model.num_drifts} changes of speed noticed")
    for key in COEFFICIENTS:
        low, high = replay.range_of(key)
        print(f"{key} {low:.3g} to {high:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=("record", "replay"), help="note steps, or predict noted ones")
    add("file", type=Path, help="one step a line, JSON; record appends to it")
    add("--url", default="http://127.0.0.1:30000", help="record: of the server")
    add("--duration-s", type=float, default=600.0, help="record: until Ctrl-C or so")
    args = parser.parse_args()
    if args.what == "record":
        try:
            record(args.url, args.file, args.duration_s)
        except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
            raise SystemExit(f"step_model.py: error: {args.url}: {error!r}") from None
    else:
        show(Replay(read_steps(args.file)))


if __name__ == "__main__":
    main()
