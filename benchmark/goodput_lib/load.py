"""All requests of a run: in a closed loop, or at the times they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from goodput_lib.execute import Seen
from goodput_lib.stream import now_ms
from sglang_taper.workload.score import Outcome, counted_window, percentile

LAG_EVERY_S = 0.05


@dataclass(frozen=True)
class Job:
    """A request to send: when it arrives (ms), and what sends it."""

    arrival_ms: float
    send: Callable[[], Awaitable[Seen]]


@dataclass
class Played:
    """What a run gave. `lags_ms`: how late the client's own timers were."""

    seen: list[Seen] = field(default_factory=list)
    is_closed: bool = False
    began_ms: float = 0.0
    ended_ms: float = 0.0
    lags_ms: list[float] = field(default_factory=list)
    client_cpu_share: float = 0.0

    @property
    def p99_lag_ms(self) -> float | None:
        return percentile(sorted(self.lags_ms), 99)


async def play(jobs: Sequence[Job], concurrency: int | None) -> Played:
    """Send every job and wait for all of them; `concurrency` None: an open loop."""
    played = Played(is_closed=concurrency is not None)
    cpu_s = time.process_time()
    async with _lags(played.lags_ms):
        played.began_ms = now_ms()
        if concurrency is None:
            played.seen = await _open_loop(jobs, played.began_ms)
        else:
            played.seen = await _closed_loop(jobs, concurrency)
        played.ended_ms = now_ms()
    spent_s = (played.ended_ms - played.began_ms) / 1000
    played.client_cpu_share = (time.process_time() - cpu_s) / max(spent_s, 1e-9)
    return played


async def _closed_loop(jobs: Sequence[Job], concurrency: int) -> list[Seen]:
    pending, seen = iter(jobs), list[Seen]()

    async def worker() -> None:
        for job in pending:
            seen.append(await job.send())

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, len(jobs))):
            workers.create_task(worker())
    return sorted(seen, key=lambda one: one.sent_ms)


async def _open_loop(jobs: Sequence[Job], began_ms: float) -> list[Seen]:
    async def later(job: Job) -> Seen:
        await asyncio.sleep(max(0.0, began_ms + job.arrival_ms - now_ms()) / 1000)
        return await job.send()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(later(job)) for job in jobs]
    return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def _lags(lags_ms: list[float]) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            began_ms = now_ms()
            await asyncio.sleep(LAG_EVERY_S)
            lags_ms.append(now_ms() - began_ms - 1000 * LAG_EVERY_S)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


# -- what counts


def counted(played: Played) -> tuple[list[Seen], float]:
    """The requests that count (`counted_window`), and the seconds they stand for."""
    seen = played.seen
    last_end_ms = max(s.closed_ms for s in seen)
    begin_ms, end_ms = counted_window(
        seen[0].sent_ms, seen[-1].sent_ms, last_end_ms, played.is_closed
    )
    if played.is_closed:
        seen = [s for s in seen if begin_ms < s.closed_ms <= end_ms]
    return seen, (end_ms - begin_ms) / 1000


def outcomes_of(
    counted_ones: Sequence[Seen], everyone: Sequence[Seen]
) -> list[Outcome]:
    """Outcomes, each with whether it was the victim of another's fork."""
    forks = [interval for seen in everyone for interval in seen.forks_ms]
    return [seen.outcome(_was_victim(seen, forks)) for seen in counted_ones]


def _was_victim(seen: Seen, forks_ms: Sequence[tuple[float, float]]) -> bool:
    first_ms = math.inf if seen.first_token_ms is None else seen.first_token_ms
    return not seen.is_decomposable and any(
        begin <= seen.closed_ms and end >= first_ms for begin, end in forks_ms
    )
