"""A server that answers `/generate` like SGLang's, with numbers instead of a model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson
from aiohttp import web

Body = dict[str, Any]
PARAMS = {
    "test_step_cost_ms": 0.0,
    **{"policy": "off", "cap": 2, "rho": 0.3, "deadline": "schedule"},
    **{"utility": "linear", "ttft_slo_ms": 2000.0, "tpot_slo_ms": 50.0},
}
COUNTERS = (
    *("num_steps", "num_deferring_steps", "num_rows_admitted", "num_rows_deferred"),
    *("num_branches", "num_prefix_shared_tokens", "num_recomputed_tokens"),
    *("num_predicted_steps", "sum_absolute_error"),
)


class StandIn:
    """Every token takes `step_s`; `bodies` and `aborted` are what was asked.

    `cumulative`: ids of all tokens so far in each event. `breaks(body)` True: the
    stream of that request ends with an error after its first token. `num_extra`:
    tokens more than were asked for.
    """

    def __init__(
        self,
        step_s: float = 0.0,
        cumulative: bool = False,
        breaks: Callable[[Body], bool] = lambda _: False,
        num_extra: int = 0,
    ) -> None:
        self.step_s, self.cumulative, self.breaks = step_s, cumulative, breaks
        self.num_extra = num_extra
        self.bodies: list[Body] = []
        # As they were put in force.
        self.policies: list[Body] = []
        self.num_flushes = 0
        self.aborted: list[str] = []
        self.url = ""
        self._next_id = 50_000

    @contextlib.contextmanager
    def running(self) -> Iterator[StandIn]:
        """Serve from another thread, so that also a blocking client gets answers."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/model_info", self._model)
        app.router.add_get("/get_model_info", self._model)
        app.router.add_get("/taper/state", self._state)
        app.router.add_post("/taper/policy", self._policy)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return runner

    async def _model(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "stand-in"})

    async def _flush(self, _: web.Request) -> web.Response:
        self.num_flushes += 1
        return web.Response()

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0", "load_format": "dummy"})

    async def _policy(self, request: web.Request) -> web.Response:
        self.policies.append(await request.json())
        return await self._state(request)

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "params": {**PARAMS, **(self.policies[-1] if self.policies else {})},
                "latency_model": {"a_ms": 1.0},
                "attention": {"backend": "stock"},
                "planner_p99_ms": 0.1,
                "counters": dict.fromkeys(COUNTERS, len(self.bodies)),
                "recent_steps": [],
                "recent_prefills": [],
            }
        )

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        num_tokens = body["sampling_params"]["max_new_tokens"] + self.num_extra
        ids: list[int] = []
        for count in range(1, num_tokens + 1):
            await asyncio.sleep(self.step_s)
            self._next_id += 1
            ids.append(self._next_id)
            reason = {"type": "length"} if count == num_tokens else None
            event: Body = {
                "text": "x" * count,
                "output_ids": ids if self.cumulative else ids[-1:],
                "meta_info": {
                    "prompt_tokens": 5,
                    "completion_tokens": count,
                    "finish_reason": reason,
                },
            }
            await answer.write(b"data: " + orjson.dumps(event) + b"\n\n")
            if self.breaks(body):
                error = {"error": {"message": "out of memory"}}
                await answer.write(b"data: " + orjson.dumps(error) + b"\n\n")
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer
