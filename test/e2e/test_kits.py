"""SGLang's own server tests pass under every policy, as branches among branches."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import requests
from kits import FAIL_ON_STOCK, LONG, NEED_MORE, all_tests, run_kit_test
from workload import STORY, branch_request

from server import Server
from sglang_taper.policy.types import PolicyParams

LOAD_WIDTH = 3
MAX_WIDTH = 256
OPENAI_ROUTES = ("/v1/completions", "/v1/chat/completions")

EVERYTHING = [name for name in all_tests() if name not in FAIL_ON_STOCK | NEED_MORE]
SHORT = [name for name in EVERYTHING if name not in LONG]
# What can go wrong with a row that is left out: its stream, stop, grammar, abort,
# and what it leaves in the cache.
ESSENTIAL = [
    "BasicAPIContract.test_health_generate",
    "BasicDecodeCorrectness.test_determinism_temp_zero",
    "BasicSchedulerStress.test_streaming_response",
    "MatchedStop.test_finish_length",
    "JSONConstrained.test_json_openai",
    "RegexConstrained.test_regex_generate_number",
    "EBNFConstrained.test_ebnf_generate_greeting",
    "CacheHit.test_multiturn_cache_hit",
    "AbortAll.test_abort_all",
]
# Prompts that share prefixes, which is what branches are.
BRANCHING = ["RadixCacheServer.test_radix_attention"]
PAUSE = "PauseResumeInPlace.test_pause_resume_in_place"
DEFERRING = [
    *(("off", name) for name in ESSENTIAL[:5]),
    *(("cap", name) for name in ESSENTIAL[5:]),
    *(("taper", name) for name in [*ESSENTIAL, *BRANCHING, PAUSE]),
]


def num_deferred(server: Server) -> int:
    return int(server.state()["counters"]["num_rows_deferred"])


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def set_policy(server: Server, policy: str) -> None:
    """Both `cap` and `taper` let a group run two rows at a time, and not three.

    With `progress` deadlines the slack at the start of a step is the TPOT; this share
    of it pays for one row beyond the one that always runs. The TPOT itself is easy to
    keep, or else `taper` would give the request up and let everything run.
    """
    model = server.state()["latency_model"]
    one_row_ms = model["a_ms"] + model["b_ms_per_row"]
    params = PolicyParams(
        policy=policy,
        cap=2,
        deadline="progress",
        tpot_slo_ms=4 * one_row_ms,
        rho=1.5 * model["b_ms_per_row"] / (3 * one_row_ms),
        ttft_slo_ms=60_000,
    )
    server.set_policy(**msgspec.structs.asdict(params))


@contextlib.contextmanager
def fork_meanwhile(server: Server, group: str) -> Iterator[None]:
    """One fork after the other runs in the background, and its rows are deferred."""
    bodies = [
        branch_request(STORY, group, i, MAX_WIDTH, max_new_tokens=96, ignore_eos=True)
        for i in range(LOAD_WIDTH)
    ]
    body = {
        "text": [body["text"] for body in bodies],
        "sampling_params": [body["sampling_params"] for body in bodies],
    }
    ended = threading.Event()

    def fork_again_and_again() -> None:
        while not ended.is_set():
            server.generate(body)

    thread = threading.Thread(target=fork_again_and_again)
    thread.start()
    try:
        wait_for(lambda: server.state()["num_running"] >= LOAD_WIDTH)
        before = num_deferred(server)
        yield
        wait_for(lambda: num_deferred(server) > before)
    finally:
        ended.set()
        while thread.is_alive():
            server.post("/abort_request", {"group": group})
            thread.join(0.2)


@pytest.fixture
def siblings(monkeypatch: pytest.MonkeyPatch) -> str:
    """A group; single requests that the kits send become branches of it."""
    group, post = uuid.uuid4().hex, requests.post
    indices = itertools.count(LOAD_WIDTH)

    def branch(params: dict[str, Any]) -> dict[str, Any]:
        meta = {"group": group, "branch": next(indices), "width": MAX_WIDTH}
        return {**params, "custom_params": {"taper": meta}}

    def send(url: str, json: Any = None, **kwargs: Any) -> requests.Response:
        path = urlsplit(url).path
        if path in OPENAI_ROUTES:
            json = branch(json)
        elif path == "/generate":
            json = {**json, "sampling_params": with_branches(json)}
        return post(url, json=json, **kwargs)

    def with_branches(body: dict[str, Any]) -> Any:
        """The samples of an `n>1` request are branches already."""
        given, prompts = body["sampling_params"], body.get("input_ids")
        if isinstance(given, list):
            return [params if is_branch(params) else branch(params) for params in given]
        if prompts and isinstance(prompts[0], list):
            return [branch(given) for _ in prompts]
        return given if is_branch(given) else branch(given)

    def is_branch(params: dict[str, Any]) -> bool:
        return params.get("n", 1) > 1 or "custom_params" in params

    monkeypatch.setattr(requests, "post", send)
    return group


@pytest.mark.parametrize("name", SHORT)
def test_plain_requests_pass_under_eager(taper_server: Server, name: str) -> None:
    set_policy(taper_server, "eager")
    before = num_deferred(taper_server)
    run_kit_test(name, taper_server)
    assert num_deferred(taper_server) == before
    taper_server.flush()


@pytest.mark.parametrize(("policy", "name"), DEFERRING)
def test_branches_pass_while_rows_are_deferred(
    taper_server: Server, siblings: str, policy: str, name: str
) -> None:
    set_policy(taper_server, policy)
    with fork_meanwhile(taper_server, siblings):
        run_kit_test(name, taper_server)
    taper_server.flush()


@pytest.mark.parametrize("name", FAIL_ON_STOCK)
def test_stock_sglang_does_not_pass_what_is_left_out(
    stock_server: Server, name: str
) -> None:
    with pytest.raises(AssertionError):
        run_kit_test(name, stock_server)


def test_what_is_left_out_exists() -> None:
    assert {*FAIL_ON_STOCK, *NEED_MORE, *LONG, *ESSENTIAL, *BRANCHING} <= set(
        all_tests()
    )
