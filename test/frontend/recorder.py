"""A server on a real port that records what clients send and answers like SGLang."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

META = {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": None}
DONE = META | {"finish_reason": {"type": "length", "length": 2}}


class Recorder:
    """The requests received, in order of arrival, and how to answer the next ones."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.routing_keys: list[str | None] = []
        self.delay_s = 0.0
        self.refuse_with: tuple[int, object] | None = None
        self.aborted: set[str] = set()

    def bodies(self, path: str = "/generate") -> list[dict[str, Any]]:
        return [body for p, body in self.requests if p == path]

    def metas(self) -> list[dict[str, Any]]:
        return [meta_of(body) for body in self.bodies()]


def meta_of(body: dict[str, Any]) -> dict[str, Any]:
    """The branch metadata of a recorded request."""
    meta: dict[str, Any] = body["sampling_params"]["custom_params"]["taper"]
    return meta


def _scored(text: str) -> dict[str, Any]:
    # Longer continuations score higher, so that a select has a definite winner.
    logprobs = [[-1.0, 1, "?"], [-1.0 / len(text), 2, "!"]]
    meta = DONE | {"input_token_logprobs": logprobs, "output_token_logprobs": []}
    return {"text": "", "meta_info": meta}


class _Handler(BaseHTTPRequestHandler):
    recorder: Recorder

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.recorder.requests.append((self.path, {}))
        self._answer(200, {"model_path": "recorder", "policy": "taper"})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        self.recorder.routing_keys.append(self.headers.get("x-smg-routing-key"))
        self.recorder.requests.append((self.path, body))
        time.sleep(self.recorder.delay_s)
        if self.recorder.refuse_with:
            self._answer(*self.recorder.refuse_with)
        elif self.path == "/generate":
            self._generate(body)
        else:
            self.recorder.aborted.add(body.get("rid", ""))
            self._answer(200, {"policy": body.get("policy")})

    def _generate(self, body: dict[str, Any]) -> None:
        if body.get("stream"):
            self._stream(body)
        elif isinstance(body.get("text"), list):
            self._answer(200, [_scored(text) for text in body["text"]])
        else:
            wanted = body["sampling_params"].get("max_new_tokens")
            text = "" if wanted == 0 else " out"
            self._answer(200, {"text": text, "meta_info": DONE})

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._chunk({"text": " ou", "meta_info": META})
        give_up = time.monotonic() + 10
        while "endless" in str(body.get("text")) and time.monotonic() < give_up:
            if body["rid"] in self.recorder.aborted:
                return
            time.sleep(0.01)
        self._chunk({"text": " out", "meta_info": DONE})
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _answer(self, status: int, answer: object) -> None:
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def running_recorder() -> Iterator[Recorder]:
    """A recorder listening on a free port of this machine."""
    recorder = Recorder()
    handler = type("Handler", (_Handler,), {"recorder": recorder})
    server = _Server(("127.0.0.1", 0), handler)
    recorder.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield recorder
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
