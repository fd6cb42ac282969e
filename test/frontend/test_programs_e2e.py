"""Fork programs on a real server."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import httpx
import msgspec
import pytest
import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as StockEndpoint
from sglang.test import test_programs as programs

import sglang_taper
from sglang_taper.frontend.client import ServerError, TaperClient
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = (
    "The harbour town lies between two hills, and its people have always lived from "
    "the sea. A visitor who walks from the station to the old market passes:"
)


POLICIES = ("off", "eager", "cap", "taper")


@pytest.fixture
def url(taper_server) -> str:
    taper_server.set_policy(**msgspec.structs.asdict(PolicyParams()))
    return taper_server.url


def flush_when_idle(url: str) -> None:
    """Empty the cache; SGLang refuses to while any request is alive."""
    give_up = time.monotonic() + 60
    while httpx.post(url + "/flush_cache").is_error:
        assert time.monotonic() < give_up, "requests are still running"
        time.sleep(0.2)


class Brief(sglang_taper.RuntimeEndpoint):
    """Cuts generations short: SGLang's programs ask for more than a CPU should do."""

    def generate(self, s, sampling_params):
        sampling_params.max_new_tokens = min(sampling_params.max_new_tokens, 24)
        return super().generate(s, sampling_params)

    def generate_stream(self, s, sampling_params):
        sampling_params.max_new_tokens = min(sampling_params.max_new_tokens, 24)
        return super().generate_stream(s, sampling_params)


@pytest.fixture
def endpoint(url):
    endpoint = Brief(url)
    flush_when_idle(url)
    before = sgl.global_config.default_backend
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(before)


@sgl.function
def listing(s, width, mode="gather_variable"):
    s += PROMPT
    branches = s.fork(width)
    branches += lambda i: f"\n{i + 1}." + sgl.gen("item", max_tokens=12)
    branches.join(mode)
    if mode == "gather_variable":
        s += "".join(f"\n{i + 1}." + text for i, text in enumerate(s["item"]))
    s += "\nIn short," + sgl.gen("summary", max_tokens=12)


@pytest.mark.usefixtures("endpoint")
@pytest.mark.parametrize(
    "program",
    [
        programs.test_mt_bench,
        programs.test_stream,
        programs.test_regex,
        programs.test_dtype_gen,
        lambda: programs.test_select(check_answer=False),
        lambda: programs.test_parallel_encoding(check_answer=False),
        lambda: programs.test_expert_answer(check_answer=False),
    ],
    ids=lambda program: (
        program.__code__.co_names[-1]
        if program.__name__ == "<lambda>"
        else program.__name__
    ),
)
def test_sglangs_own_program_passes(program):
    program()


def test_a_fork_says_the_same_as_with_the_stock_backend(url, endpoint):
    ours = listing.run(width=3, temperature=0, backend=endpoint)
    stock = listing.run(width=3, temperature=0, backend=StockEndpoint(url))
    assert ours["item"] == stock["item"]
    assert ours.text() == stock.text()


def test_stock_sglang_says_the_same_as_a_server_that_regulates_width(
    endpoint, stock_server
):
    stock = sglang_taper.RuntimeEndpoint(stock_server.url, tpot_slo_ms=50)
    for stream in (False, True):
        states = [
            listing.run(width=3, temperature=0, backend=backend, stream=stream)
            for backend in (endpoint, stock)
        ]
        assert states[0].text() == states[1].text()


def test_siblings_prefill_the_shared_prefix_once(endpoint):
    branches = {}

    @sgl.function
    def program(s):
        s += PROMPT
        branches["all"] = s.fork(4)
        branches["all"] += lambda i: f"\n{i + 1}." + sgl.gen("item", max_tokens=4)
        branches["all"].join()

    program.run(temperature=0)
    for state in branches["all"].states:
        info = state.get_meta_info("item")
        assert info["prompt_tokens"] - info["cached_tokens"] <= 8
        assert info["cached_tokens"] > 20


def test_both_joins_continue_from_the_same_text(endpoint):
    gathered = listing.run(width=3, temperature=0)
    appended = listing.run(width=3, temperature=0, mode="concate_and_append")
    assert gathered.text() == appended.text()


def regulate(server, policy):
    """Under `taper` extra rows never fit: the step of one row takes up the slack."""
    model = server.state()["latency_model"]
    tpot_ms = model["a_ms"] + model["b_ms_per_row"]
    changes = {"cap": 1, "tpot_slo_ms": tpot_ms, "rho": 0, "policy": policy}
    server.set_policy(**changes)
    return server.state()["counters"]["num_rows_deferred"]


@pytest.mark.parametrize("policy", POLICIES)
def test_sglangs_fork_program_passes_under_every_policy(taper_server, endpoint, policy):
    before = regulate(taper_server, policy)
    programs.test_parallel_decoding()
    after = taper_server.state()["counters"]["num_rows_deferred"]
    assert (after > before) == (policy != "eager")


@pytest.mark.parametrize("policy", POLICIES)
def test_nested_forks_and_batches_of_them_finish(taper_server, endpoint, policy):
    before = regulate(taper_server, policy)

    @sgl.function
    def program(s, topic):
        s += f"{PROMPT} {topic}"
        outer = s.fork(2)
        for branch in outer.states:
            inner = branch.fork(2)
            inner += sgl.gen("leaf", max_tokens=6)
            inner.join()
            branch += "".join(branch["leaf"]) + sgl.gen("twig", max_tokens=6)
        outer.join()

    states = program.run_batch([{"topic": t} for t in ("boats", "nets", "salt")])
    for state in states:
        assert state.error() is None
        assert [len(leaves) for leaves in state["leaf"]] == [2, 2]
        assert len(state["twig"]) == 2
    after = taper_server.state()["counters"]["num_rows_deferred"]
    assert (after > before) == (policy != "eager")


def test_a_streamed_fork_gives_the_text_of_one_that_is_not_streamed(endpoint):
    whole = listing.run(width=3, temperature=0).text()
    streamed = listing.run(width=3, temperature=0, stream=True)
    assert "".join(streamed.text_iter()) == whole


def test_programs_of_two_backends_run_in_one_process(url, endpoint):
    results: dict[str, str] = {}

    def run(name, backend):
        results[name] = listing.run(width=3, temperature=0, backend=backend).text()

    backends = {"ours": endpoint.with_slo(tpot_slo_ms=500), "stock": StockEndpoint(url)}
    threads = [threading.Thread(target=run, args=item) for item in backends.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["ours"] == results["stock"]


def test_client_forks_say_what_the_same_prompts_say_alone(url):
    suffixes = [f"\n{i}." for i in range(1, 4)]
    params = {"temperature": 0, "max_new_tokens": 12}

    async def main():
        async with TaperClient(url) as client:
            alone = [await client.generate(PROMPT + s, params) for s in suffixes]
            together = dict.fromkeys(range(3), "")
            async with client.fork(PROMPT, suffixes, params) as events:
                async for event in events:
                    together[event.branch] += event.text
            return [answer["text"] for answer in alone], list(together.values())

    alone, together = asyncio.run(main())
    assert together == alone


def test_leaving_a_client_fork_frees_the_server(url):
    params = {"max_new_tokens": 4000, "ignore_eos": True}

    async def main():
        async with (
            TaperClient(url) as client,
            client.fork(PROMPT, [" a", " b"], params) as events,
        ):
            await anext(events)

    asyncio.run(main())
    flush_when_idle(url)


def test_a_bad_request_is_an_error_with_the_servers_message(url):
    async def main():
        async with TaperClient(url) as client:
            await client.generate("Hi", {"no_such_parameter": 1}, meta=BranchMeta())

    with pytest.raises(ServerError, match=re.escape("no_such_parameter")) as caught:
        asyncio.run(main())
    assert caught.value.status == 400
