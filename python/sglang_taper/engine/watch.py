"""The routes of who looks on: the page, what it shows, the timeline of one request.

The page holds no data, so it needs no key; it asks for one and fetches with it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_taper.engine import page
from sglang_taper.engine.messages import EXPLAIN, LIVE
from sglang_taper.engine.routes import ask, error_response, told
from sglang_taper.errors import FieldError

PAGE_PATH = "/taper/"
MAX_STEP = 2**62
_AFTER_STEP = {
    "name": "after_step",
    "in": "query",
    "description": "leave out the steps up to this one",
    "schema": {"type": "integer", "minimum": 0, "maximum": MAX_STEP, "default": 0},
}


def add_watch_routes(app: FastAPI) -> None:
    """On the app itself: SGLang reads the authorisation level from its own routes."""
    app.add_api_route(PAGE_PATH, get_page, methods=["GET"], response_class=HTMLResponse)
    app.add_api_route(
        "/taper/live",
        get_live,
        methods=["GET"],
        responses={HTTPStatus.BAD_REQUEST: {"description": "bad after_step"}},
        openapi_extra={"parameters": [_AFTER_STEP]},
    )
    app.add_api_route(
        "/taper/requests/{id:path}",
        get_request,
        methods=["GET"],
        responses={HTTPStatus.NOT_FOUND: {"description": "unknown or forgotten"}},
    )


async def get_page() -> Response:
    """The live view: a page without data, which fetches `/taper/live`."""
    return HTMLResponse(page.html(), headers=page.headers())


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_live(request: Request) -> Response:
    """What the page shows: requests with their branches, steps after `after_step`."""
    try:
        after_step = _checked_step(request.query_params.get("after_step", "0"))
    except FieldError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST)
    return told([a.state for a in await ask(LIVE, {"after_step": after_step})])


def _checked_step(text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    if not is_number or int(text) > MAX_STEP:
        raise FieldError("after_step", text, f"an integer from 0 to {MAX_STEP}")
    return int(text)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_request(id: str) -> Response:
    """The timeline of one request (by its group or request id) or of one branch.

    404 for an id that is unknown, or that has been forgotten since it ended.
    """
    known = [a.state for a in await ask(EXPLAIN, {"id": id}) if a.state]
    if not known:
        message = (
            f"no request or branch {id!r} is known here: it never came, or it has "
            "ended and was forgotten since"
        )
        return error_response(message, HTTPStatus.NOT_FOUND)
    return told(known)


class PageWithoutKey:
    """ASGI middleware before SGLang's check of API keys: answers for the page alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == PAGE_PATH:
            await (await get_page())(scope, receive, send)
        elif path == PAGE_PATH.rstrip("/"):
            # Relative, for whoever serves us below a prefix.
            await RedirectResponse("taper/")(scope, receive, send)
        else:
            await self._app(scope, receive, send)
        return None


def page_without_key_hook(_: None, app: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER `add_api_key_middleware`: what is added last is entered first."""
    app.add_middleware(PageWithoutKey)
