"""The branches of a fork run, their answers merged into one order.

A branch that SGLang refuses ends with a final event that says why; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_taper.engine.fork_api.calls import ForkCall, join_request
from sglang_taper.engine.fork_api.prompts import Piece, written_before_end
from sglang_taper.engine.sharing import num_distinct
from sglang_taper.engine.token_ids import prompt_ids_of
from sglang_taper.protocol import META_INFO_KEY

logger = logging.getLogger(__name__)

Event = dict[str, Any]


class Progress:
    """One request of the fork: what it has written, and its last event."""

    def __init__(self, branch: int | None, request: GenerateReqInput) -> None:
        self.branch, self.request = branch, request
        self.text = ""
        self.output_ids: list[int] = []
        self.last: Event | None = None
        self.is_refused = False

    @property
    def info(self) -> dict[str, Any]:
        """`meta_info` of the last event; {} before, and where it never ran."""
        return (self.last or {}).get("meta_info") or {}

    @property
    def has_finished(self) -> bool:
        """Whether it came to an end of its own: not aborted, cancelled or refused."""
        return self.last is not None and self.last["finish_reason"]["type"] != "abort"

    def note(self, out: dict[str, Any], incremental: bool) -> Event:
        """The event for an answer of SGLang."""
        meta = dict(out["meta_info"])
        ids = out.get("output_ids") or []
        text = out.get("text") or ""
        if incremental:
            self.text += text
            self.output_ids += ids
        else:
            # Not copied at every step: a branch may write many thousands.
            self.text, self.output_ids = text, ids
        event: Event = self._event(text, meta.get("finish_reason"))
        if logprobs := {k: meta.pop(k) for k in [*meta] if "logprobs" in k}:
            event["logprobs"] = logprobs
        if event["finish_reason"] is not None:
            event |= {"output_ids": list(ids), "meta_info": meta}
            self._end(event)
        return event

    def refuse(self, error: Exception) -> Event:
        """Its last event, because SGLang has raised `error`."""
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR
        message = str(error) or type(error).__name__
        if isinstance(error, HTTPException):
            status, message = error.status_code, str(error.detail)
        elif isinstance(error, ValueError):
            status = getattr(error, "status_code", HTTPStatus.BAD_REQUEST)
        else:
            logger.error("branch %s of a fork failed", self.request.rid, exc_info=error)
        reason = {"type": "abort", "message": message, "status_code": int(status)}
        event = self._event("", reason)
        self._end(event)
        return event

    def _end(self, event: Event) -> None:
        self.last = event
        # Aborts by a client, or by us, have no status.
        status = event["finish_reason"].get("status_code") or HTTPStatus.OK
        self.is_refused = status >= HTTPStatus.BAD_REQUEST

    def _event(self, text: str, reason: dict[str, Any] | None) -> Event:
        rid = self.request.rid
        return {
            "branch": self.branch,
            "rid": rid,
            "text": text,
            "finish_reason": reason,
        }


class ForkRun:
    """A call that runs. `events` starts it; closing that iterator aborts the rest."""

    def __init__(self, call: ForkCall, manager: Any, request: Request) -> None:
        self.call = call
        self._manager, self._request = manager, request
        self.branches = [
            Progress(index, branch.request)
            for index, branch in enumerate(call.branches)
        ]
        self.join: Progress | None = None
        self._incremental = call.stream and manager.incremental_streaming_output

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of all branches as they come, then those of the join."""
        async with aclosing(self._run(self.branches)) as events:
            async for event in events:
                yield event
        if self.call.join is not None:
            async with aclosing(self._run_join()) as events:
                async for event in events:
                    yield event

    async def _run_join(self) -> AsyncGenerator[Event, None]:
        finished = [branch for branch in self.branches if branch.has_finished]
        parts = [piece for branch in finished for piece in self._written(branch)]
        request = join_request(self.call, parts, self._manager)
        self.join = Progress(None, request)
        if not finished:
            yield self.join.refuse(ValueError("no branch has finished"))
            return
        async with aclosing(self._run([self.join])) as events:
            async for event in events:
                yield event

    def _written(self, branch: Progress) -> Iterator[Piece]:
        """What a finished branch has added to the prompt, its answer included."""
        assert branch.branch is not None
        yield from self.call.branches[branch.branch].pieces
        if branch.request.text is not None and isinstance(branch.request.text, str):
            yield branch.text
        else:
            assert branch.last is not None
            yield written_before_end(
                self._manager,
                prompt_ids_of(branch.request) or (),
                branch.output_ids,
                branch.text,
                branch.last["finish_reason"],
            )

    async def _run(self, running: Sequence[Progress]) -> AsyncGenerator[Event, None]:
        # Bounded: where a client reads slowly, SGLang itself merges what is late.
        queue: asyncio.Queue[Event] = asyncio.Queue(len(running))
        pumps = [asyncio.create_task(self._pump(one, queue)) for one in running]
        num_open = len(pumps)
        try:
            while num_open:
                event = await queue.get()
                num_open -= event["finish_reason"] is not None
                yield event
        finally:
            # SGLang aborts a request whose answers nobody waits for any more.
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, one: Progress, queue: asyncio.Queue[Event]) -> None:
        # An abort of the group since the call is meant for all of it, the join as well.
        one.request.taper_called_ms = self.call.called_ms  # type: ignore[attr-defined]
        answers = self._manager.generate_request(one.request, self._request)
        try:
            async with aclosing(answers):
                async for out in answers:
                    await queue.put(one.note(out, self._incremental))
        except Exception as error:
            if one.last is None:
                await queue.put(one.refuse(error))

    # -- what was done for the whole request

    def summary(self) -> dict[str, Any]:
        """`usage` and `taper`, once every event has been seen."""
        everyone = [*self.branches, *([self.join] if self.join else [])]
        prompts = [prompt_ids_of(p.request) or () for p in everyone if not p.is_refused]
        usage = UsageProcessor.calculate_token_usage(
            prompt_tokens=num_distinct(prompts),
            completion_tokens=sum(p.info.get("completion_tokens", 0) for p in everyone),
            reasoning_tokens=sum(p.info.get("reasoning_tokens", 0) for p in everyone),
        )
        taper = {
            "group": self.call.group,
            "width": len(self.branches),
            "num_finished": sum(branch.has_finished for branch in self.branches),
            "branches": [b.info.get(META_INFO_KEY) for b in self.branches],
            "join": self.join and self.join.info.get(META_INFO_KEY),
        }
        return {"usage": usage.model_dump(), "taper": taper}
