"""Runs the program of a front end: its parts are requests like any other.

The client gets one answer in SGLang's own form. Streamed, `text` is the answer in its
own order, so that every route can show it, and `meta_info["front_end"]` says what each
branch has generated as it comes. The decisions are those of `front_ends/run.py`; here
requests are made, heard and aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import fastapi
from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_taper.engine.front_end_answers import AnswerWriter, Chunk, Place, encode
from sglang_taper.engine.front_end_requests import (
    FIELD,
    bound_of,
    check_front_end,
    checked_meta,
    front_end_of,
    part_metas,
    part_request,
)
from sglang_taper.engine.requests import prepare, prepare_request_hook
from sglang_taper.errors import FieldError
from sglang_taper.front_ends.registry import make_front_end
from sglang_taper.front_ends.run import ABORTED, ProgramRun
from sglang_taper.front_ends.types import Part, Prompt
from sglang_taper.protocol import BranchMeta

Answers = AsyncGenerator[dict[str, Any], None]
_PROGRAMS = "taper_programs"


def generate_request_hook(
    original: Callable[..., Any], manager: Any, obj: Any, request: Any = None
) -> Any:
    """AROUND `TokenizerManager.generate_request`, which all routes and Engine enter.

    A request that names a front end becomes many; any other has its metadata checked.
    """
    name = front_end_of(obj, getattr(request, "headers", None))
    if name is not None:
        return serve_program(manager, obj, request, name)
    prepare_request_hook(manager, obj, request)
    return original(manager, obj, request)


async def refuse_before_stream_hook(
    original: Callable[[GenerateReqInput, Request], Awaitable[Any]],
    obj: GenerateReqInput,
    request: Request,
) -> Any:
    """AROUND `serve_generate_request`: HTTP 400 instead of a 200 stream with an error.

    A streaming /generate has sent its status before `generate_request` is entered.
    """
    try:
        check_front_end(obj, request.headers)
        prepare(obj, request.headers)
    except FieldError as error:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)
    return await original(obj, request)


def abort_program_hook(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """BEFORE `TokenizerManager.abort_request`: the rid of a program ends its parts."""
    served = getattr(manager, _PROGRAMS, {}).get(rid)
    if served is not None and not abort_all:
        served.abort()


async def serve_program(
    manager: Any, obj: GenerateReqInput, request: Any, name: str
) -> Answers:
    """Answers of one request: while it runs if it streams, and the whole one.

    Raises FieldError, FrontEndError and whatever SGLang raises for a part.
    """
    meta = checked_meta(obj, name)
    obj.normalize_batch_and_arguments()
    manager.auto_create_handle_loop()
    run = await _start(manager, obj, name)
    served = ServedProgram(manager, obj, request, meta, run)
    writer = AnswerWriter(manager, obj, name)
    programs = manager.__dict__.setdefault(_PROGRAMS, {})
    if obj.rid in programs or obj.rid in manager.rid_to_state:
        raise FieldError("rid", obj.rid, "an id that is not in use")
    programs[obj.rid] = served
    try:
        parts = run.start()
        while parts:
            async with aclosing(served.stage(parts, writer)) as answers:
                async for answer in answers:
                    if obj.stream:
                        yield answer
            parts = served.next_parts
        last = writer.last(run)
    finally:
        del programs[obj.rid]
    # After the clean-up: a caller that does not stream never comes back.
    yield last


async def _start(manager: Any, obj: GenerateReqInput, name: str) -> ProgramRun:
    tokenizer = manager.tokenizer
    if tokenizer is None:
        raise FieldError(FIELD, name, "no front end on a server without a tokenizer")
    ids, text = obj.input_ids, obj.text
    if ids is None:
        ids, _ = await manager._tokenize_texts(text)
    if text is None:
        text = tokenizer.decode(ids)
    bound = bound_of(obj.sampling_params, manager.preferred_sampling_params)
    return ProgramRun(name, make_front_end(name), Prompt(text, tuple(ids)), bound)


class ServedProgram:
    """The requests of the stage of a program that runs."""

    def __init__(
        self,
        manager: Any,
        obj: GenerateReqInput,
        request: Any,
        meta: BranchMeta,
        run: ProgramRun,
    ) -> None:
        self._manager, self._obj, self._request = manager, obj, request
        self._meta, self._run = meta, run
        self._live: dict[int, Place] = {}
        self._num_forks = 0
        self._serial_rid: str | None = None
        self._is_aborted = False
        self.next_parts: tuple[Part, ...] = ()

    def abort(self) -> None:
        """End all parts, and the program with them."""
        self._is_aborted = True
        self._abort_parts()

    def _abort_parts(self) -> None:
        for place in list(self._live.values()):
            if place.rid in self._manager.rid_to_state:
                self._manager.abort_request(place.rid)

    async def stage(self, parts: tuple[Part, ...], writer: AnswerWriter) -> Answers:
        """An answer per chunk of any part; `next_parts` are then those that follow.

        Leaving early, by an error or because the client has gone, aborts all parts.
        """
        queue: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self.next_parts = ()
        pumps = [
            asyncio.create_task(self._pump(queue, branch, request))
            for branch, request in enumerate(self._requests(parts, writer.num_ended))
        ]
        try:
            while self._live:
                chunk = await queue.get()
                if isinstance(chunk, Exception):
                    raise chunk
                place = self._live[chunk.branch]
                chunk = self._take(chunk, parts[chunk.branch], writer)
                yield writer.running(self._run, place, chunk)
        finally:
            self._abort_parts()
            self._live = {}
            for pump in pumps:
                pump.cancel()

    def _requests(
        self, parts: tuple[Part, ...], num_before: int
    ) -> list[GenerateReqInput]:
        width = len(parts)
        self._num_forks += width > 1
        metas = part_metas(self._meta, width, self._num_forks, self._serial_rid)
        prompt = self._run.prompt.ids
        requests = [
            part_request(
                self._obj,
                part,
                [*prompt, *encode(self._manager.tokenizer, part.prompt)],
                meta,
                self._run.max_new_tokens_of(part),
                num_before + branch,
            )
            for branch, (part, meta) in enumerate(zip(parts, metas, strict=True))
        ]
        stage = self._run.num_stages - 1
        for branch, request in enumerate(requests):
            self._live[branch] = Place(stage, branch, width, str(request.rid))
        if width == 1:
            self._serial_rid = self._live[0].rid
        return requests

    async def _pump(
        self,
        queue: asyncio.Queue[Chunk | Exception],
        branch: int,
        part: GenerateReqInput,
    ) -> None:
        is_incremental = part.stream and self._manager.incremental_streaming_output
        num_chars = num_ids = 0
        try:
            async for out in self._manager.generate_request(part, self._request):
                text, ids = out["text"], list(out["output_ids"])
                if not is_incremental:
                    text, ids = text[num_chars:], ids[num_ids:]
                    num_chars, num_ids = num_chars + len(text), num_ids + len(ids)
                queue.put_nowait(Chunk(branch, text, ids, out["meta_info"]))
        except Exception as error:  # told to the client by the one who waits
            queue.put_nowait(error)

    def _take(self, chunk: Chunk, part: Part, writer: AnswerWriter) -> Chunk:
        """Tell the program; returns the chunk without what only ended the part."""
        writer.note(chunk.meta_info)
        self._run.hear(chunk.branch, chunk.text, chunk.ids)
        reason = chunk.meta_info["finish_reason"]
        if reason is None:
            return chunk
        _raise_if_refused(reason)
        writer.note_end(self._live.pop(chunk.branch), chunk.meta_info)
        ending = self._ending_of(part, reason)
        self.next_parts = self._run.end(chunk.branch, reason, ending)
        if self._is_aborted and not self._live:
            self.next_parts = ()
            self._run.stop({"type": ABORTED, "message": "the program was aborted"})
        return chunk._replace(text=chunk.text.removesuffix(ending))

    def _ending_of(self, part: Part, reason: dict[str, Any]) -> str:
        """Text that ended a part and is not its own; SGLang trims it likewise."""
        matched = reason.get("matched")
        if isinstance(matched, str):
            return "" if matched in part.stop else matched
        if not isinstance(matched, int):
            return ""
        params = {**self._obj.sampling_params, **part.sampling_params}
        skips = params.get("skip_special_tokens", True)
        decode = self._manager.tokenizer.decode
        return str(decode([matched], skip_special_tokens=skips))


def _raise_if_refused(reason: dict[str, Any]) -> None:
    """An error that the scheduler ended a streamed part with; SGLang raises others."""
    status = reason.get("status_code")
    if reason.get("type") != ABORTED or status is None:
        return
    message = reason.get("message")
    if status == fastapi.status.HTTP_400_BAD_REQUEST:
        raise ValueError(message)
    raise fastapi.HTTPException(status_code=status, detail=message)
