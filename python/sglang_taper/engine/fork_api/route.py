"""The HTTP of `POST /fork`: server-sent events or one object, and plain refusals."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from sglang.srt.entrypoints.http_server import ORJSONRoute, get_global_state
from sglang.srt.utils.json_response import SGLangORJSONResponse, dumps_json
from starlette.exceptions import HTTPException

from sglang_taper.engine.fork_api.calls import make_call
from sglang_taper.engine.fork_api.running import Event, ForkRun
from sglang_taper.engine.fork_api.schema import (
    Continuation,
    ForkAnswer,
    ForkError,
    ForkEvent,
    ForkRequest,
)
from sglang_taper.engine.routes import error_response
from sglang_taper.errors import FieldError
from sglang_taper.protocol import GROUP_HEADER

FORK_PATH = "/fork"
Events = AsyncGenerator[Event, None]
# Pydantic's names for something else where an object is wanted.
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")
_REF = "#/components/schemas/"
_SUMMARY = {
    "type": "object",
    "required": ["usage", "taper"],
    "properties": {
        "usage": {"$ref": _REF + "UsageInfo"},
        "taper": {"$ref": _REF + "ForkReport"},
    },
}
# An item is one event of the stream; its data is JSON, or [DONE] at the end.
_DATA = {
    "type": "string",
    "contentMediaType": "application/json",
    "contentSchema": {"oneOf": [{"$ref": _REF + ForkEvent.__name__}, _SUMMARY]},
}
_ITEM = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"anyOf": [{"const": "[DONE]"}, _DATA]}},
}


class ForkRoute(ORJSONRoute):
    """SGLang's route, with our words for a body that is not acceptable."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def refusing(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:
                return error_response(str(field_error(error)), HTTPStatus.BAD_REQUEST)
            except HTTPException as error:
                return error_response(str(error.detail), HTTPStatus(error.status_code))

        return refusing


def install_fork(app: FastAPI) -> None:
    """Add the route to SGLang's app; it needs the API key where one is set."""
    app.router.add_api_route(
        FORK_PATH,
        fork,
        methods=["POST"],
        route_class_override=ForkRoute,
        response_model=None,
        responses={
            200: {
                "model": ForkAnswer,
                "content": {"text/event-stream": {"itemSchema": _ITEM}},
            },
            400: {"model": ForkError},
        },
    )


async def fork(body: ForkRequest, request: Request) -> Response:
    """Continue one prompt in several ways at once, as the branches of one request.

    400 when the call is not acceptable, or when every branch is refused.
    """
    manager = get_global_state().tokenizer_manager
    try:
        run = ForkRun(await make_call(body, manager, request), manager, request)
    except FieldError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST)
    events = run.events()
    try:
        begun = await _until_one_runs(events, run)
        if not body.stream:
            async for _ in events:
                pass
    except BaseException:
        await events.aclose()
        raise
    if all(branch.is_refused for branch in run.branches):
        await events.aclose()
        return _refusal(run)
    return _streamed(begun, events, run) if body.stream else _answer(run)


async def _until_one_runs(events: Events, run: ForkRun) -> list[Event]:
    """The events up to the first of a branch that SGLang has not refused: until then
    the status of the answer is open."""
    begun: list[Event] = []
    while not all(branch.is_refused for branch in run.branches):
        event = await anext(events)
        begun.append(event)
        if not run.branches[event["branch"]].is_refused:
            break
    return begun


def _refusal(run: ForkRun) -> Response:
    last = run.branches[0].last
    assert last is not None
    reason = last["finish_reason"]
    return error_response(f"branches[0]: {reason['message']}", reason["status_code"])


def _streamed(begun: list[Event], events: Events, run: ForkRun) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        async with aclosing(events):
            for event in begun:
                yield _line(event)
            async for event in events:
                yield _line(event)
        yield _line(run.summary())
        yield b"data: [DONE]\n\n"

    media_type = "text/event-stream"
    return StreamingResponse(lines(), media_type=media_type, headers=_headers(run))


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + dumps_json(event) + b"\n\n"


def _headers(run: ForkRun) -> dict[str, str]:
    return {GROUP_HEADER: run.call.group}


def _answer(run: ForkRun) -> Response:
    answer = {
        "branches": [branch.last for branch in run.branches],
        "join": run.join and run.join.last,
        **run.summary(),
    }
    return SGLangORJSONResponse(answer, headers=_headers(run))


def field_error(error: RequestValidationError) -> FieldError:
    """The first thing that is wrong with the body, in our words."""
    first = error.errors()[0]
    place = first["loc"][1:]
    if first["type"] == "json_invalid":
        return FieldError("body", error.body, "a JSON object")
    if first["type"] == "extra_forbidden":
        model = Continuation if place[0] in ("branches", "join") else ForkRequest
        accepted = f"known keys are {', '.join(model.model_fields)}"
    elif first["type"] == "missing":
        return FieldError(_path(place), None, "required")
    elif first["type"] in _NO_OBJECT:
        accepted = "an object"
    else:
        accepted = first["msg"].removeprefix("Input should be ")
    return FieldError(_path(place), first.get("input"), accepted)


def _path(place: tuple[Any, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return "body" + "".join(steps)
