"""A small asynchronous client for SGLang's native routes, with branches.

    async with TaperClient("http://127.0.0.1:30000") as client:
        async with client.fork("Three cities:", ["\\n1.", "\\n2.", "\\n3."]) as events:
            async for event in events:
                print(event.branch, event.text)

Prompts and suffixes are text, or token ids if the prompt is. Every method raises
ServerError with the server's own message when the server refuses, fails or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_taper.frontend.branch import COMMIT_MIN_CHARS, Prompt, joined, with_branch
from sglang_taper.frontend.connection import Connection, ServerError
from sglang_taper.frontend.server_fork import (
    ForkEvents,
    ForkResult,
    Part,
    WhatToCancel,
    fork_body,
)
from sglang_taper.ids import new_group, new_rid
from sglang_taper.protocol import BranchMeta, fork_meta


@dataclass(frozen=True)
class StreamEvent:
    """What one branch has produced since its last event."""

    branch: int
    rid: str
    text: str
    meta_info: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        """Whether this is the branch's last event."""
        return self.meta_info.get("finish_reason") is not None


class TaperClient:
    """One server; use it as an asynchronous context manager, or call `close`."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        """Sends nothing yet. `timeout_s` is the longest silence of the server."""
        self._connection = Connection(base_url, api_key, timeout_s)

    async def __aenter__(self) -> TaperClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the server aborts what they were waiting for."""
        await self._connection.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        meta: BranchMeta | None = None,
        rid: str | None = None,
    ) -> dict[str, Any]:
        """Generate and wait: `{"text": ..., "meta_info": ...}` as `/generate` answers.

        `meta` makes the request a branch, or gives it SLOs; `rid` names it for `abort`.
        """
        body = _body(prompt, sampling_params, meta, rid)
        answer: dict[str, Any] = await self._send("POST", "/generate", body)
        return answer

    async def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        meta: BranchMeta | None = None,
        rid: str | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Generate, yielding an event per step; closing the iterator aborts the rest.

        A loop left early closes it late: wrap it in `contextlib.aclosing`. The server
        must stream the text so far (its default), not `--incremental-streaming-output`.
        """
        body = _body(prompt, sampling_params, meta, rid) | {"stream": True}
        finished = False
        try:
            async for event in self._events(body, meta.branch if meta else 0):
                finished = event.finished
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            # SGLang notices a closed connection only seconds later.
            if not finished:
                with contextlib.suppress(ServerError):
                    await self.abort(body["rid"])
            raise

    async def _events(
        self, body: Mapping[str, Any], branch: int
    ) -> AsyncIterator[StreamEvent]:
        position = 0
        async for chunk in self._connection.events("/generate", body):
            text = chunk["text"][position:]
            position += len(text)
            yield StreamEvent(branch, body["rid"], text, chunk["meta_info"])

    @contextlib.asynccontextmanager
    async def fork(
        self,
        prompt: Prompt,
        suffixes: Sequence[Prompt],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        source: BranchMeta | None = None,
        commit_prefix: bool = True,
    ) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        """Continue `prompt` with every suffix at once, as the branches of one request.

        Gives an iterator over the events of all branches as they come. Leaving the
        block aborts what is unfinished; the first failing branch raises its error.
        `source` is the branch that forks (default: a new request), so a later fork of
        the same request passes the same group and the next `stage`. `commit_prefix`
        first sends the prompt alone, unless it is short, so that a server without our
        policies prefills it once; one round trip.
        """
        source = source or BranchMeta(group=new_group())
        parent = None
        if commit_prefix and len(suffixes) > 1 and len(prompt) > COMMIT_MIN_CHARS:
            parent = new_rid()
            nothing = {"max_new_tokens": 0}
            await self.generate(prompt, nothing, meta=source, rid=parent)
        metas = fork_meta(source, len(suffixes), source.stage + 1, parent)
        queue: asyncio.Queue[StreamEvent | Exception | None] = asyncio.Queue()
        pumps = [
            asyncio.create_task(
                self._pump(queue, joined(prompt, suffix), sampling_params, meta)
            )
            for suffix, meta in zip(suffixes, metas, strict=True)
        ]
        try:
            yield _drained(queue, len(pumps))
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        queue: asyncio.Queue[StreamEvent | Exception | None],
        prompt: Prompt,
        sampling_params: Mapping[str, Any] | None,
        meta: BranchMeta,
    ) -> None:
        try:
            async for event in self.generate_stream(prompt, sampling_params, meta=meta):
                queue.put_nowait(event)
        except Exception as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    async def fork_once(
        self,
        prompt: Prompt | Mapping[str, Any],
        branches: Sequence[Part],
        sampling_params: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> ForkResult:
        """One `POST /fork`: all branches, and the join, once they have ended.

        `prompt` is text, token ids, `{"messages": [...]}` or `{"rid": ...}`. A branch
        is what it adds (text or ids) or an object of the route; `fields` are other keys
        of its body, as `join=` and `first_k=` (docs/fork_api.md).
        """
        body = fork_body(prompt, branches, sampling_params, fields)
        return ForkResult(**await self._send("POST", "/fork", body))

    @contextlib.asynccontextmanager
    async def fork_stream(
        self,
        prompt: Prompt | Mapping[str, Any],
        branches: Sequence[Part],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        cancel: WhatToCancel | None = None,
        **fields: Any,
    ) -> AsyncIterator[ForkEvents]:
        """`fork_once`, giving an iterator over the events of all branches as they come.

        After each event `cancel` is shown what every branch has written so far, and
        the branches whose indices it returns are cancelled. Leaving the block closes
        the stream, and the server aborts what is unfinished. The server must stream
        the text so far, as for `generate_stream`.
        """
        body = fork_body(prompt, branches, sampling_params, fields) | {"stream": True}
        async with contextlib.aclosing(
            self._connection.events("/fork", body)
        ) as received:
            yield ForkEvents(received, body["branches"], self.abort, cancel)

    async def abort(self, rid: str) -> None:
        """Abort the request `rid`; nothing happens if the server does not know it."""
        await self._send("POST", "/abort_request", {"rid": rid})

    async def abort_group(self, group: str) -> None:
        """Abort every branch of `group` (servers of this package only)."""
        await self._send("POST", "/abort_request", {"group": group})

    async def state(self) -> dict[str, Any]:
        """The policy, its counters and the latency model (`GET /taper/state`)."""
        state: dict[str, Any] = await self._send("GET", "/taper/state")
        return state

    async def set_policy(self, **settings: Any) -> dict[str, Any]:
        """Change `policy`, `cap`, `rho`, `deadline`, `utility` or a default SLO.

        They hold from one decode step on; returns the state then in force.
        """
        state: dict[str, Any] = await self._send("POST", "/taper/policy", settings)
        return state

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        return await self._connection.send(method, path, body)


def _body(
    prompt: Prompt,
    sampling_params: Mapping[str, Any] | None,
    meta: BranchMeta | None,
    rid: str | None,
) -> dict[str, Any]:
    params = with_branch(sampling_params, meta) if meta else dict(sampling_params or {})
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return {**asked, "sampling_params": params, "rid": rid or new_rid()}


async def _drained(
    queue: asyncio.Queue[StreamEvent | Exception | None], num_open: int
) -> AsyncIterator[StreamEvent]:
    while num_open:
        item = await queue.get()
        if item is None:
            num_open -= 1
        elif isinstance(item, Exception):
            raise item
        else:
            yield item
