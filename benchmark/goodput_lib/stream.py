"""One `/generate` stream, with the time of every token.

Over aiohttp, whose parser is compiled: an event costs a quarter of what it does over
httpx, and a GPU sends thousands a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

from sglang_taper.frontend.branch import with_branch
from sglang_taper.frontend.connection import IDLE_S
from sglang_taper.ids import new_rid
from sglang_taper.protocol import META_INFO_KEY, BranchMeta

_END = b"[DONE]"


class RequestFailed(Exception):
    """A stream was refused, broke off, or gave other tokens than asked for."""


def now_ms() -> float:
    return 1000 * time.perf_counter()


@dataclass
class Row:
    """What one stream gave: times in ms, one for each event that brought tokens."""

    rid: str
    sent_ms: float
    times_ms: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @property
    def taper(self) -> dict[str, Any]:
        """What a server with a branch policy says about a finished branch."""
        return self.meta_info.get(META_INFO_KEY) or {}

    def gaps_ms(self, with_first: bool) -> list[float]:
        """Between tokens; with the wait for the first one if asked."""
        begins = [self.sent_ms, *self.times_ms] if with_first else self.times_ms
        return [later - earlier for earlier, later in pairwise(begins)]

    def add(self, event: dict[str, Any]) -> None:
        """Whether ids come as increments or as all so far, both are understood."""
        self.meta_info = event["meta_info"]
        total = self.meta_info["completion_tokens"]
        ids = event["output_ids"]
        new = total - len(self.output_ids)
        if new > 0:
            self.times_ms.append(now_ms())
            self.output_ids += ids[-new:]

    def check(self, num_tokens: int) -> None:
        """Tokens asked for, received and billed are the same, or RequestFailed."""
        reason = self.meta_info.get("finish_reason") or {}
        billed = self.meta_info.get("completion_tokens")
        if not len(self.output_ids) == billed == num_tokens:
            raise RequestFailed(
                f"asked for {num_tokens} tokens, got {len(self.output_ids)}, the "
                f"server counts {billed} ({reason.get('type', 'no end')})"
            )


class Target:
    """A server that requests are sent to; an asynchronous context manager.

    `sends_metadata` False: as to a stock server, branches are strangers to each other.
    """

    def __init__(self, url: str, timeout_s: float, sends_metadata: bool = True) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.sends_metadata = sends_metadata
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Target:
        self._session = aiohttp.ClientSession(
            # aiohttp queues from 100 connections on, which would hold branches back.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        num_tokens: int,
        meta: BranchMeta | None,
        temperature: float,
    ) -> Row:
        """Exactly `num_tokens` tokens after `input_ids`; raises RequestFailed.

        A stream that is given up on is aborted.
        """
        row = Row(new_rid(), now_ms())
        params: dict[str, Any] = {
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": temperature,
        }
        if meta is not None and self.sends_metadata:
            params = with_branch(params, meta)
        body = {
            "input_ids": input_ids,
            "sampling_params": params,
            "rid": row.rid,
            "stream": True,
        }
        try:
            async for event in self._events(body):
                row.add(event)
        except aiohttp.ClientError as error:
            raise RequestFailed(f"no answer: {error!r}") from error
        except BaseException:
            await self._abort(row.rid)
            raise
        row.check(num_tokens)
        return row

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        assert self._session is not None, "use it as a context manager"
        content = orjson.dumps(body)
        headers = {"content-type": "application/json"}
        async with self._session.post(
            f"{self.url}/generate", data=content, headers=headers
        ) as answer:
            if answer.status != 200:
                raise RequestFailed((await answer.text())[:500])
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data != _END:
                        yield _event(data)

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            assert self._session is not None
            await self._session.post(f"{self.url}/abort_request", json={"rid": rid})


def _event(data: bytes) -> dict[str, Any]:
    event: dict[str, Any] = orjson.loads(data)
    if "error" in event:
        raise RequestFailed(str(event["error"])[:500])
    return event
