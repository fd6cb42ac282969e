"""The servers of a comparison: ours, and stock SGLang without our plugin."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

import sglang_taper
from goodput_lib.options import Options
from goodput_lib.policies import Contender
from goodput_lib.stream import Target
from sglang_taper.demo.compare import flush_cache
from sglang_taper.demo.steps import StepLog, state_of
from sglang_taper.frontend.client import ServerError, TaperClient
from sglang_taper.models import resolve_model_path
from sglang_taper.server_process import ServerProcess

# Small events, whatever the length of the answer.
COMMON_FLAGS = ("--incremental-streaming-output",)
# Only what makes SGLang run on a CPU at all; none of our hooks is loaded.
STOCK_ENV = {"SGLANG_PLUGINS": "sglang_taper_cpu"}
# The server keeps 256 steps.
POLL_S = 2.0
# Of everything a server says about its arguments, what a result depends on.
_SHOWN_ARGUMENTS = (
    *("model_path", "dtype", "load_format", "device", "tp_size", "attention_backend"),
    *("max_total_tokens", "max_running_requests", "chunked_prefill_size"),
    *("mem_fraction_static", "page_size", "disable_overlap_schedule"),
    *("disable_radix_cache", "cuda_graph_max_bs", "incremental_streaming_output"),
)


class LiveServer:
    """A running server: its target for requests, and what can be done to it."""

    def __init__(self, url: str, options: Options, is_stock: bool) -> None:
        self.url, self.is_stock = url, is_stock
        timeout_s = options.args.request_timeout_s
        self.target = Target(url, timeout_s, sends_metadata=not is_stock)
        self._client = TaperClient(url)
        # Parameters of its policy before the first switch.
        self._initial: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.planner_p99_ms: float | None = None

    @property
    def max_total_tokens(self) -> float:
        """Tokens that fit into its KV pool, as far as it says."""
        return self.facts.get("max_total_num_tokens") or math.inf

    async def prepare(self) -> None:
        """Ask it what it is; raises DemoError for a server without our policies."""
        async with httpx.AsyncClient(timeout=30) as http:
            info = (await http.get(f"{self.url}/server_info")).json()
        shown = {name: info.get(name) for name in _SHOWN_ARGUMENTS}
        self.facts = {
            "sglang": info.get("version"),
            "arguments": shown,
            "max_total_num_tokens": info.get("max_total_num_tokens"),
            "weights": "random" if shown["load_format"] == "dummy" else "real",
        }
        if not self.is_stock:
            state = await state_of(self._client)
            self._initial = state["params"]
            self.facts |= {
                "sglang_taper": sglang_taper.__version__,
                "latency_profile": state["latency_model"],
                "attention": state["attention"]["backend"],
                "test_step_cost_ms": state["params"]["test_step_cost_ms"],
            }

    async def switch(self, contender: Contender, slos_ms: dict[str, float]) -> None:
        """Empty the cache and put the policy in force, every parameter of it."""
        await flush_cache(self.url, None)
        if not self.is_stock:
            targets = {f"{name}_slo_ms": slos_ms[name] for name in slos_ms}
            known = {n: v for n, v in targets.items() if n in self._initial}
            # The rho in use stands there; that of a policy follows its deadline.
            await self._client.set_policy(
                **{**self._initial, "rho": None, **known, **contender.changes}
            )

    @contextlib.asynccontextmanager
    async def steps(self) -> AsyncIterator[StepLog | None]:
        """What the engine does meanwhile; None from a stock server."""
        if self.is_stock:
            yield None
            return
        log = StepLog()
        log.add(await state_of(self._client))
        poller = asyncio.create_task(self._poll(log))
        try:
            yield log
        finally:
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
        state = await state_of(self._client)
        self.planner_p99_ms = state["planner_p99_ms"]
        log.add(state)

    async def _poll(self, log: StepLog) -> None:
        with contextlib.suppress(ServerError):
            while True:
                await asyncio.sleep(POLL_S)
                log.add(await state_of(self._client))

    async def close(self) -> None:
        """Give the server the policy back that it had."""
        if self._initial:
            with contextlib.suppress(ServerError):
                await self._client.set_policy(**self._initial)
        await self._client.close()


@contextlib.asynccontextmanager
async def live_servers(
    options: Options, note: Callable[[str], None]
) -> AsyncIterator[dict[bool, LiveServer]]:
    """The servers that the policies need, by whether they are stock.

    What has no URL is started, and ended again.
    """
    args, started = options.args, list[ServerProcess]()
    given = {False: args.base_url, True: args.stock_base_url}
    kinds = sorted({contender.is_stock for contender in options.policies})
    if options.args.slo_procedure and False not in kinds:
        kinds.insert(0, False)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(_stop, started)
        servers = {}
        for is_stock in kinds:
            url = given[is_stock]
            if url is None:
                started.append(_start(options, is_stock))
                await started[-1].ready(note)
                url = started[-1].url
            server = servers[is_stock] = LiveServer(url, options, is_stock)
            stack.push_async_callback(server.close)
            await stack.enter_async_context(server.target)
            await server.prepare()
        yield servers


def shared_flags(options: Options) -> list[str]:
    """Flags of ours and of stock SGLang alike."""
    # sglang.lang reads the text so far from every event.
    return [*([] if options.programs else COMMON_FLAGS), *options.server_flags]


def _stop(started: list[ServerProcess]) -> None:
    for server in started:
        server.stop(keep_log=False)


def _start(options: Options, is_stock: bool) -> ServerProcess:
    args = options.args
    flags = shared_flags(options)
    if is_stock:
        module, model = "sglang.launch_server", resolve_model_path(args.model_path)
        return ServerProcess(model, flags, module, STOCK_ENV)
    flags += [*options.taper_flags, "--test-step-cost-ms", str(args.test_step_cost_ms)]
    return ServerProcess(args.model_path, flags)
