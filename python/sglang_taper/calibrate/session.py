"""A running server from the side of a calibration: its state, and batches to time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

from sglang_taper.calibrate.fit import CellSteps, TimedPrefill, TimedStep
from sglang_taper.errors import FieldError
from sglang_taper.probe import Cell, Limits, flush, show

STEPS_PER_CELL = 16
CONTROL_TIMEOUT_S = 60
# Every row that there is runs in every step, and runs at once.
POLICY = {"policy": "eager", "prefill_hold_s": "off"}


class Session:
    """Talks to the server at `url`. Raises requests.RequestException when it fails,
    FieldError when it is no server that can be calibrated."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        state = self.state()
        if "dp_ranks" in state:
            accepted = "a server without data parallelism: its ranks differ"
            raise FieldError("--url", url, accepted)
        engine, pool = state["engine"], state["pool"]
        self.limits = Limits(
            max_rows=engine.pop("max_rows"),
            max_tokens=pool["total"],
            vocab_size=engine["vocab_size"],
            headers=self._headers,
            max_request_tokens=engine["context_length"],
        )
        model = state["latency_model"]
        # What a step's time depends on; the sizes of the pool are not part of it.
        self.subject: dict[str, Any] = {
            "engine": engine,
            "shared_read_once": model["shared_read_once"],
            "graph_buckets": model["graph_buckets"],
            "test_step_cost_ms": state["params"]["test_step_cost_ms"],
        }
        self._params = {name: state["params"][name] for name in POLICY}

    def state(self) -> dict[str, Any]:
        answer = requests.get(
            f"{self.url}/taper/state", headers=self._headers, timeout=CONTROL_TIMEOUT_S
        )
        if answer.status_code == requests.codes.not_found:
            raise FieldError("--url", self.url, "a server with a branch policy")
        answer.raise_for_status()
        return dict(answer.json())

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run every row meanwhile; then the server has its own policy again."""
        self._set_policy(POLICY)
        try:
            yield
        finally:
            self._set_policy(self._params)

    def _set_policy(self, changes: dict[str, Any]) -> None:
        requests.post(
            f"{self.url}/taper/policy",
            json=changes,
            headers=self._headers,
            timeout=CONTROL_TIMEOUT_S,
        ).raise_for_status()

    def measure(self, cell: Cell, seed: int, max_s: float) -> CellSteps:
        """Show `cell`, for at most `max_s`, and collect its steps and prefills as the
        server's scheduler timed them."""
        before = _last_step(self.state())
        began = time.monotonic()
        try:
            show(self.url, cell, STEPS_PER_CELL, self.limits, seed, max_s)
            wall_s = time.monotonic() - began
            state = self.state()
        finally:
            flush(self.url, self._headers)
        steps = steps_of(cell, state["recent_steps"], before)
        prefills = prefills_of(state["recent_prefills"], before)
        return CellSteps(cell, wall_s, steps, prefills)


def _last_step(state: dict[str, Any]) -> int:
    return max((step["step"] for step in state["recent_steps"]), default=0)


def steps_of(cell: Cell, records: list[dict[str, Any]], before: int) -> list[TimedStep]:
    """Of the steps after number `before` those that ran `cell` and nothing else.

    Without the first, in which things may happen that happen once.
    """
    whole = [
        record
        for record in records
        if record["step"] > before
        and record["num_rows"] == record["num_admitted"] == cell.num_rows
    ]
    return [
        TimedStep(record["num_admitted"], record["kv_tokens"], record["measured_ms"])
        for record in whole[1:]
        if record["measured_ms"] is not None
    ]


def prefills_of(records: list[dict[str, Any]], before: int) -> list[TimedPrefill]:
    """Those that came after decode step number `before`."""
    return [
        TimedPrefill(record["num_tokens"], record["measured_ms"])
        for record in records
        if record["step"] >= before and record["measured_ms"] is not None
    ]
