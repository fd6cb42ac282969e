"""A server that answers a calibration and whose steps take what a law says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENGINE = {
    "model": "fake",
    "dtype": "float32",
    "device": "cpu: imagined",
    "vocab_size": 1000,
    "context_length": 4096,
    "max_rows": 16,
    "versions": {"sglang": "0"},
}
PARAMS = {"policy": "taper", "prefill_hold_s": "auto", "test_step_cost_ms": 0.0}


def law(rows: int, kv_tokens: int) -> float:
    return 20.0 + 1.5 * rows + 0.01 * kv_tokens


def prefill_law(num_tokens: int) -> float:
    return 30.0 + 0.5 * num_tokens


class FakeServer:
    """What it was asked, and what it would answer to `GET /taper/state`. A step really
    takes `step_s`, and the last is the one after which its rows were aborted."""

    def __init__(self, step_ms: Callable[[int, int], float] = law) -> None:
        self.step_ms = step_ms
        self.shown: list[tuple[int, int]] = []
        self.policies: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.prefills: list[dict[str, Any]] = []
        self.step_s = 0.0
        self.aborted: list[str] = []
        self.num_flushes = 0
        self.fails_after = 1_000_000
        self.state_changes: dict[str, Any] = {}
        self.url = ""

    def state(self) -> dict[str, Any]:
        return {
            "engine": dict(ENGINE),
            "pool": {"total": 4000},
            "params": dict(PARAMS),
            "latency_model": {"shared_read_once": False, "graph_buckets": []},
            "recent_steps": self.records[-256:],
            "recent_prefills": self.prefills[-64:],
            **self.state_changes,
        }

    def generate(self, body: dict[str, Any]) -> bool:
        prompts = body["input_ids"]
        rows, tokens = len(prompts), len(prompts[0])
        self.shown.append((rows, tokens))
        self._prefill(rows * tokens)
        for index in range(1, body["sampling_params"]["max_new_tokens"]):
            self._step(rows, rows * (tokens + index))
            time.sleep(self.step_s)
            if body["rid"][-1] in self.aborted:
                return False
        return len(self.shown) <= self.fails_after

    def _prefill(self, num_tokens: int) -> None:
        self.prefills.append(
            {
                "step": len(self.records),
                "num_tokens": num_tokens,
                "measured_ms": prefill_law(num_tokens),
            }
        )

    def _step(self, rows: int, kv_tokens: int) -> None:
        self.records.append(
            {
                "step": len(self.records) + 1,
                "num_rows": rows,
                "num_admitted": rows,
                "kv_tokens": kv_tokens,
                "measured_ms": self.step_ms(rows, kv_tokens),
            }
        )


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, server.state())

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            works = True
            if self.path == "/taper/policy":
                server.policies.append(body)
            elif self.path == "/generate":
                works = server.generate(body)
            elif self.path == "/abort_request":
                server.aborted.append(body["rid"])
            elif self.path.startswith("/flush_cache"):
                server.num_flushes += 1
            self._answer(200 if works else 500, {})

        def _answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None: ...

    return Handler


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
