"""The mix that every policy gets: serial requests beside requests that fork.

A closed loop: so many of each kind at a time, from fixed lists. It keeps the serial
requests among forks for their whole life, however fast the machine is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_taper.demo.score import BranchSteps, RequestRecord
from sglang_taper.frontend.client import StreamEvent, TaperClient
from sglang_taper.protocol import META_INFO_KEY

# Short on purpose: on a CPU, attention over a long context costs more than the rows.
_SUBJECTS = ("A ship", "The river", "My neighbour", "An old clock", "The market")
_ACTIONS = ("waits for", "remembers", "was painted by", "leads to", "belongs to")
_OBJECTS = ("the morning train", "a quiet island", "two brothers", "the last harvest")
STAGGER_S = 0.2


@dataclass(frozen=True)
class SerialRequest:
    """One continuation of exactly `num_tokens` tokens."""

    prompt: str
    num_tokens: int


@dataclass(frozen=True)
class ForkRequest:
    """One branch of exactly `num_tokens` tokens for each suffix."""

    prompt: str
    suffixes: tuple[str, ...]
    num_tokens: int


@dataclass(frozen=True)
class MixSize:
    """How much is sent, and how much of it at a time."""

    num_serial: int
    serial_at_once: int
    serial_tokens: tuple[int, int]
    num_forks: int
    forks_at_once: int
    fan_out: tuple[int, int]
    branch_tokens: tuple[int, int]


FULL = MixSize(6, 6, (64, 76), 6, 3, (7, 10), (26, 34))
QUICK = MixSize(4, 4, (36, 40), 3, 2, (6, 8), (18, 22))


@dataclass(frozen=True)
class Mix:
    """Requests in the order they are sent; the same for every policy."""

    serial: tuple[SerialRequest, ...]
    forks: tuple[ForkRequest, ...]
    size: MixSize

    @property
    def num_tokens(self) -> int:
        forked = sum(len(f.suffixes) * f.num_tokens for f in self.forks)
        return forked + sum(r.num_tokens for r in self.serial)


def make_mix(size: MixSize, seed: int) -> Mix:
    """The mix of this size; the same for the same seed."""
    rng = random.Random(seed)
    serial = tuple(
        SerialRequest(_prompt(rng), rng.randint(*size.serial_tokens))
        for _ in range(size.num_serial)
    )
    forks = tuple(
        ForkRequest(
            prompt=_prompt(rng) + " Ways to go on:",
            suffixes=tuple(f"\n{i + 1}." for i in range(rng.randint(*size.fan_out))),
            num_tokens=rng.randint(*size.branch_tokens),
        )
        for _ in range(size.num_forks)
    )
    return Mix(serial, forks, size)


def _prompt(rng: random.Random) -> str:
    parts = (rng.choice(words) for words in (_SUBJECTS, _ACTIONS, _OBJECTS))
    # The number keeps prompts apart, so that no request finds another one's prefix.
    return f"Story {rng.randrange(10_000)}. {' '.join(parts)}, and so it began."


async def run_mix(client: TaperClient, mix: Mix) -> list[RequestRecord]:
    """Send everything and wait for it; raises ServerError if any of it fails."""
    serial = [
        lambda r=r, i=i: send_serial(client, r, f"serial {i + 1}")
        for i, r in enumerate(mix.serial)
    ]
    forks = [
        lambda r=r, i=i: send_fork(client, r, f"fork {i + 1}")
        for i, r in enumerate(mix.forks)
    ]
    groups = await all_of(
        _closed_loop(serial, mix.size.serial_at_once),
        _closed_loop(forks, mix.size.forks_at_once),
    )
    return [record for group in groups for record in group]


async def _closed_loop(
    jobs: Sequence[Callable[[], Awaitable[RequestRecord]]], at_once: int
) -> list[RequestRecord]:
    pending = iter(jobs)

    async def worker(index: int) -> list[RequestRecord]:
        await asyncio.sleep(index * STAGGER_S)
        return [await job() for job in pending]

    results = await all_of(*(worker(i) for i in range(at_once)))
    return [record for records in results for record in records]


async def all_of(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """`asyncio.gather` that leaves nothing running when one fails."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_serial(
    client: TaperClient,
    request: SerialRequest,
    name: str,
    on_event: Callable[[StreamEvent], None] | None = None,
) -> RequestRecord:
    """Send one serial request; `on_event` sees its stream."""
    sent_s = time.perf_counter()
    seen = _Seen()
    sampling = _sampling(request.num_tokens)
    async for event in client.generate_stream(request.prompt, sampling):
        seen.add(event)
        if on_event:
            on_event(event)
    return seen.record(name, False, sent_s)


async def send_fork(
    client: TaperClient, request: ForkRequest, name: str
) -> RequestRecord:
    """Send one forking request; it is measured as a whole, from the first send."""
    sent_s = time.perf_counter()
    seen = _Seen()
    sampling = _sampling(request.num_tokens)
    async with client.fork(request.prompt, request.suffixes, sampling) as events:
        async for event in events:
            seen.add(event)
    return seen.record(name, True, sent_s)


def _sampling(num_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}


class _Seen:
    """When the tokens of one request came, and how many each branch got."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.tokens: dict[int, int] = {}
        self.steps: list[BranchSteps] = []

    def add(self, event: StreamEvent) -> None:
        self.last_s = time.perf_counter()
        if self.first_s is None:
            self.first_s = self.last_s
        self.tokens[event.branch] = event.meta_info["completion_tokens"]
        if event.finished:
            self.steps += branch_steps([event.meta_info])

    def record(self, name: str, is_forked: bool, sent_s: float) -> RequestRecord:
        return RequestRecord(
            name=name,
            is_forked=is_forked,
            sent_s=sent_s,
            first_token_s=self.last_s if self.first_s is None else self.first_s,
            last_token_s=self.last_s,
            num_tokens=sum(self.tokens.values()),
            num_critical_tokens=max(self.tokens.values(), default=0),
            branches=tuple(self.steps),
        )


def branch_steps(infos: Iterable[Any]) -> list[BranchSteps]:
    """What the server says about finished branches; requests alone say nothing."""
    ours = (info.get(META_INFO_KEY) for info in infos)
    return [
        BranchSteps(info["steps_run"], info["steps_deferred"]) for info in ours if info
    ]
