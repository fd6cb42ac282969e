"""Control over HTTP: `/taper/state`, `/taper/policy`, and groups in `/abort_request`.

The routes live on SGLang's own FastAPI app and have the authorisation of its admin
routes. Each asks every data-parallel rank and answers when all have answered.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.utils import TypeBasedDispatcher
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_taper.changes import schema_of_changes, updated_params
from sglang_taper.engine.clock import monotonic_ms
from sglang_taper.engine.headers import scope_of
from sglang_taper.engine.messages import TaperControlReq, TaperControlReqOutput
from sglang_taper.errors import FieldError, HookError
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import parse_branch_meta

ABORT_PATH = "/abort_request"
_ABORT_KEYS = ("group", "parent")


def attach_control_hook(_: None, manager: Any) -> None:
    """AFTER `init_communicators`: one more communicator, and our routes on the app.

    Sets `manager.taper_communicator`. Uvicorn has not started at this point.
    """
    from sglang.srt.entrypoints import http_server

    manager.taper_communicator = FanOutCommunicator(
        manager._dispatch_to_scheduler, get_parallel().num_dp_ranks
    )
    manager._result_dispatcher += TypeBasedDispatcher(
        [(TaperControlReqOutput, manager.taper_communicator.handle_recv)]
    )
    install_routes(http_server.app)


def install_routes(app: FastAPI) -> None:
    """Add our routes to SGLang's app, once. Raises HookError without /abort_request.

    Not through `include_router`: SGLang reads the authorisation level from the routes
    it finds directly on the app.
    """
    if getattr(app.state, "taper_routes", False):
        return
    app.state.taper_routes = True
    # Imported here: those routes ask through `ask`, or answer as these do.
    from sglang_taper.engine.fork_api.route import install_fork
    from sglang_taper.engine.watch import add_watch_routes

    add_watch_routes(app)
    app.add_api_route("/taper/state", get_state, methods=["GET"])
    app.add_api_route("/taper/policy", set_policy, methods=["POST"], **_policy_docs())
    install_fork(app)
    abort = next((r for r in app.router.routes if _path(r) == ABORT_PATH), None)
    if abort is None:
        raise HookError(f"SGLang's server has no route {ABORT_PATH}")
    abort.app = _with_group_abort(abort.app)  # type: ignore[attr-defined]


def _policy_docs() -> dict[str, Any]:
    """What FastAPI cannot see in `set_policy`, which reads its body itself."""
    content = {"application/json": {"schema": schema_of_changes()}}
    refused = {HTTPStatus.BAD_REQUEST: "not acceptable", HTTPStatus.CONFLICT: "refused"}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {code: {"description": why} for code, why in refused.items()},
    }


def _path(route: object) -> str | None:
    return getattr(route, "path", None)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_state() -> Response:
    """The scheduler's state: policy, parameters, latency model, groups, counters."""
    return _answer(await ask("state", {}))


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def set_policy(request: Request) -> Response:
    """Change policy parameters while running; answers with the state in force.

    400 for a body that is not acceptable, 409 when the scheduler refuses it.
    """
    try:
        changes = _json_object(await request.body())
        updated_params(PolicyParams(), changes)
    except FieldError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST)
    return _answer(await ask("policy", changes))


async def ask(action: str, params: dict[str, Any]) -> list[TaperControlReqOutput]:
    """Send one control message to the schedulers; one answer per data-parallel rank."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    request = TaperControlReq(action=action, params=params)
    answers: list[TaperControlReqOutput] = await manager.taper_communicator(request)
    return answers


def _answer(answers: list[TaperControlReqOutput]) -> Response:
    errors = {answer.error for answer in answers if answer.error}
    if errors:
        return error_response("; ".join(sorted(errors)), HTTPStatus.CONFLICT)
    return told([answer.state for answer in answers])


def told(states: list[dict[str, Any]]) -> Response:
    """What one data-parallel rank says, or several, in the order of their numbers:
    they come in the order in which they happened to answer."""
    if len(states) == 1:
        return JSONResponse(states[0])
    states = sorted(states, key=lambda state: int(state["dp_rank"]))
    return JSONResponse({"dp_ranks": states})


def error_response(message: str, status: HTTPStatus) -> Response:
    """An error in the form of SGLang's control routes."""
    return JSONResponse({"error": {"message": message}}, status_code=status)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except ValueError:
        raise FieldError("body", body, "a JSON object") from None
    if not isinstance(parsed, dict):
        raise FieldError("body", parsed, "a JSON object")
    return parsed


def _with_group_abort(stock: ASGIApp) -> ASGIApp:
    """SGLang's abort route, but a body with a `group` aborts (a part of) that group."""

    async def abort(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        if _names_group(body):
            response = await _abort_group(orjson.loads(body), _reach(request))
            await response(scope, receive, send)
        else:
            await stock(scope, _replayed(body, receive), send)

    return abort


def _names_group(body: bytes) -> bool:
    try:
        parsed = orjson.loads(body)
    except ValueError:
        return False
    # A `parent` alone is ours to refuse: to SGLang it would be an abort of everything.
    return isinstance(parsed, dict) and any(
        parsed.get(key) is not None for key in _ABORT_KEYS
    )


def _reach(request: Request) -> str | None:
    """Whose groups this caller may abort, None: everybody's.

    The operator reaches all: who has the admin key (where there is one, SGLang lets
    nobody else in), or who comes to a server without keys and shows none.
    """
    if get_serving().admin_api_key:
        return None
    return scope_of(request.headers) or None


async def _abort_group(body: dict[str, Any], scope: str | None) -> Response:
    """Abort a group, or the branch `parent` of it and all below that.

    200 also when there is no such group or branch.
    """
    try:
        meta = parse_branch_meta({key: body.get(key) for key in _ABORT_KEYS}, "body")
        if body.get("rid") or body.get("abort_all"):
            raise FieldError("body.group", meta.group, "without rid and abort_all")
    except FieldError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST)
    target = {"group": meta.group, "parent": meta.parent, "scope": scope}
    given = {key: value for key, value in target.items() if value is not None}
    answers = await ask("abort_group", {**given, "now_ms": monotonic_ms()})
    failed = any(answer.error for answer in answers)
    return _answer(answers) if failed else Response(status_code=HTTPStatus.OK)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` after the body was read: the body once more, then what follows."""
    pending: list[Message] = [
        {"type": "http.request", "body": body, "more_body": False}
    ]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again
