"""Decode steps as the server saw them, from `GET /taper/state`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from sglang_taper.demo.errors import DemoError
from sglang_taper.frontend.client import ServerError, TaperClient

# The server keeps 256 steps: five seconds of a CPU, one of a GPU.
POLL_S = 0.5
NUM_BINS = 40

Step = Mapping[str, Any]


class StepLog:
    """Every step seen while it was open, and what the counters grew by."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}
        # By the step before each: one of several passes between two steps is enough.
        self._prefills: dict[int, Step] = {}
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}
        self.coefficients: dict[str, Any] = {}

    def add(self, state: Mapping[str, Any]) -> None:
        """Note a state. A step seen again may have been measured meanwhile."""
        if self._first is None:
            # What ran before the log was opened is not part of it.
            self._first = state["counters"]
            self._from_step = state["counters"]["num_steps"]
        self._last = state["counters"]
        self.coefficients = state["latency_model"]
        for step in state["recent_steps"]:
            if step["step"] > self._from_step:
                self._steps[step["step"]] = step
        for prefill in state["recent_prefills"]:
            if prefill["step"] > self._from_step and prefill["measured_ms"]:
                self._prefills[prefill["step"]] = prefill

    @property
    def steps(self) -> list[Step]:
        return [self._steps[number] for number in sorted(self._steps)]

    @property
    def prefills(self) -> list[tuple[int, float]]:
        """New tokens and ms of the prefill passes that were measured."""
        passes = self._prefills.values()
        return [(p["num_tokens"], p["measured_ms"]) for p in passes]

    def growth(self, counter: str) -> float:
        return float(self._last[counter] - (self._first or {})[counter])


@contextlib.asynccontextmanager
async def step_log(client: TaperClient) -> AsyncIterator[StepLog]:
    """A log of what the server does inside the block, complete at its end."""
    log = StepLog()
    log.add(await state_of(client))
    poller = asyncio.create_task(_poll(client, log))
    try:
        yield log
    finally:
        poller.cancel()
        await asyncio.gather(poller, return_exceptions=True)
    log.add(await state_of(client))


async def _poll(client: TaperClient, log: StepLog) -> None:
    # A server that is gone is noticed by whoever waits for an answer of it.
    with contextlib.suppress(ServerError):
        while True:
            await asyncio.sleep(POLL_S)
            log.add(await state_of(client))


async def state_of(client: TaperClient) -> dict[str, Any]:
    """The server's state; raises DemoError if it has no branch policy, or several."""
    try:
        state = await client.state()
    except ServerError as error:
        if error.status != 404:
            raise
        raise DemoError(
            "this server has no branch policy: start it with sglang_taper.launch_server"
        ) from error
    if "dp_ranks" in state:
        raise DemoError("the demo needs a server with one data-parallel rank")
    return state


def step_facts(logs: Sequence[StepLog]) -> dict[str, Any]:
    """What the server decided and predicted in the blocks of these logs."""
    steps = [step for log in logs for step in log.steps]
    both = [s for s in steps if s["predicted_ms"] and s["measured_ms"]]
    num_predicted = sum(log.growth("num_predicted_steps") for log in logs)
    error = sum(log.growth("sum_absolute_error") for log in logs)
    return {
        **{name: int(_total(logs, name)) for name in _COUNTS},
        "predicted_ms": _mean(s["predicted_ms"] for s in both),
        "measured_ms": _mean(s["measured_ms"] for s in both),
        "mape": error / num_predicted if num_predicted else None,
        "rows_over_time": binned([s["num_admitted"] for s in steps]),
        "latency_model": logs[-1].coefficients,
    }


_COUNTS = (
    "num_steps",
    "num_deferring_steps",
    "num_rows_admitted",
    "num_rows_deferred",
    "num_branches",
    "num_prefix_shared_tokens",
    "num_recomputed_tokens",
)


def _total(logs: Iterable[StepLog], counter: str) -> float:
    return sum(log.growth(counter) for log in logs)


def forked_widths(steps: Iterable[Step]) -> list[int]:
    """Width of the only forking request of these steps.

    Every other request runs exactly one row.
    """
    return [s["num_admitted"] - s["num_requests"] + 1 for s in steps]


def binned(values: Sequence[float], num_bins: int = NUM_BINS) -> list[float]:
    """`values` in order as at most `num_bins` means over equal stretches."""
    bins = min(num_bins, len(values))
    edges = [i * len(values) // bins for i in range(bins + 1)] if bins else [0]
    return [fmean(values[low:high]) for low, high in pairwise(edges)]


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None
