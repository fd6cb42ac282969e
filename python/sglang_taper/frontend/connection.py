"""HTTP as the client speaks it: requests, streams of events, errors as ServerError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import httpx

from sglang_taper.errors import TaperError
from sglang_taper.frontend.branch import routing_headers

# An idle connection is used again for so long. SGLang closes it after five seconds,
# and a request that meets the closing fails.
IDLE_S = 2.0


class ServerError(TaperError):
    """The server did not do what it was asked; `status` is None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """The connections to one server."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            headers=headers,
            timeout=timeout_s,
            # httpx queues from 100 connections on, which would hold branches back.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
        )

    async def close(self) -> None:
        """Close all connections; the server aborts what they were waiting for."""
        await self._http.aclose()

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        """The JSON of the answer, None where it is empty."""
        with _reporting_transport_errors():
            response = await self._http.request(
                method, path, json=body, headers=routing_headers(body)
            )
        _raise_for_status(response)
        return response.json() if response.content else None

    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a POST, up to [DONE]."""
        with _reporting_transport_errors():
            stream = self._http.stream(
                "POST", path, json=body, headers=routing_headers(body)
            )
            async with stream as response:
                if response.is_error:
                    await response.aread()
                _raise_for_status(response)
                async for event in _server_sent_events(response):
                    yield event


async def _server_sent_events(
    response: httpx.Response,
) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        chunk = json.loads(payload)
        if "error" in chunk:
            raise ServerError(_message(chunk), chunk["error"].get("code"))
        yield chunk


@contextlib.contextmanager
def _reporting_transport_errors() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise ServerError(f"no answer from {error.request.url}: {reason}") from error


def _raise_for_status(response: httpx.Response) -> None:
    if response.is_error:
        try:
            message = _message(response.json())
        except json.JSONDecodeError:
            message = response.text or response.reason_phrase
        raise ServerError(message, response.status_code)


def _message(answer: Any) -> str:
    """The message in any of the forms SGLang's routes answer errors with."""
    if isinstance(answer, Mapping):
        for key in ("error", "message", "detail"):
            if key in answer:
                return _message(answer[key])
    return str(answer)
