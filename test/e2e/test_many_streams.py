"""256 clients stream four branches each: what they see and when.

A client's inter-token latency is taken over the same tokens as the scheduler's: of all
branches of a request, from the first token to the last. The scheduler tells its own as
`tpot_ms` with each branch that ends; the last one speaks for the whole request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from statistics import mean, quantiles
from typing import Any

import aiohttp
import pytest
from forking import assert_idle_pool, branch_of, new_group, some_ids

from server import Server

NUM_CLIENTS, NUM_BRANCHES, NUM_TOKENS = 256, 4, 16
TOLERANCE = 0.1


@dataclass
class Seen:
    """What one client gets: its events with the time of each, in seconds."""

    sent_s: float = 0.0
    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    ended: bool = False

    def of_branch(self, index: int) -> list[dict[str, Any]]:
        return [event for _, event in self.events if event["index"] == index]

    @property
    def itl_ms(self) -> float:
        """Over the tokens of all branches; those of the first event do not count."""
        (first_s, _), (last_s, _) = self.events[0], self.events[-1]
        return 1000 * (last_s - first_s) / (NUM_BRANCHES * NUM_TOKENS - 1)

    @property
    def scheduler_itl_ms(self) -> float:
        return float(self.events[-1][1]["meta_info"]["taper"]["tpot_ms"])


async def watch(session: aiohttp.ClientSession, body: dict[str, Any]) -> Seen:
    seen = Seen(time.perf_counter())
    async with session.post("/generate", json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                seen.events.append((time.perf_counter(), json.loads(line[6:])))
            elif line.startswith(b"data: [DONE]"):
                seen.ended = True
    return seen


async def watch_all(url: str, bodies: list[dict[str, Any]]) -> list[Seen]:
    options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=600)}
    options["connector"] = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, **options) as session:
        return list(await asyncio.gather(*(watch(session, body) for body in bodies)))


@pytest.fixture(scope="module")
def seen(taper_server: Server) -> list[Seen]:
    taper_server.set_policy(policy="taper")
    taper_server.flush()
    more = {"n": NUM_BRANCHES, "max_new_tokens": NUM_TOKENS}
    bodies = [
        branch_of(new_group(), some_ids(("stream", client), 16), **more)
        for client in range(NUM_CLIENTS)
    ]
    seen = asyncio.run(watch_all(taper_server.url, bodies))
    assert_idle_pool(taper_server)
    return seen


def is_final(event: dict[str, Any]) -> bool:
    return event["meta_info"]["finish_reason"] is not None


def test_every_branch_of_every_client_ends_exactly_once_and_last(
    seen: list[Seen],
) -> None:
    assert len(seen) == NUM_CLIENTS
    for client in seen:
        assert client.ended
        for index in range(NUM_BRANCHES):
            events = client.of_branch(index)
            assert [is_final(e) for e in events] == [False] * (len(events) - 1) + [True]
            last = events[-1]["meta_info"]
            assert last["taper"]["branch"] == index
            assert last["completion_tokens"] == NUM_TOKENS


def test_the_events_of_a_branch_come_in_order(seen: list[Seen]) -> None:
    for client in seen:
        for index in range(NUM_BRANCHES):
            events = client.of_branch(index)
            counts = [event["meta_info"]["completion_tokens"] for event in events]
            assert counts == sorted(set(counts))
            for before, after in itertools.pairwise(events):
                ids = before["output_ids"]
                assert after["output_ids"][: len(ids)] == ids


def test_clients_see_the_latency_that_the_scheduler_measures(
    seen: list[Seen], capsys: pytest.CaptureFixture[str]
) -> None:
    clients = [client.itl_ms for client in seen]
    scheduler = [client.scheduler_itl_ms for client in seen]
    ratio = mean(clients) / mean(scheduler)
    first_s = [client.events[0][0] - client.sent_s for client in seen]
    with capsys.disabled():
        print(
            f"\n{NUM_CLIENTS} clients, {NUM_BRANCHES} branches of {NUM_TOKENS} tokens: "
            f"ITL {mean(clients):.2f} ms seen, {mean(scheduler):.2f} ms in the "
            f"scheduler (ratio {ratio:.3f}; p90 {quantiles(clients, n=10)[-1]:.2f} "
            f"and {quantiles(scheduler, n=10)[-1]:.2f}); TTFT {mean(first_s):.1f} s"
        )
    assert abs(ratio - 1) <= TOLERANCE
