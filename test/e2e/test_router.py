"""SGLang's router in front of two replicas: a group stays on one of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import sglang as sgl
from forking import meta_of, new_group, wait_for

import sglang_taper
from server import EXACT, Server, free_port, running_server
from sglang_taper.frontend.client import ServerError, StreamEvent, TaperClient
from sglang_taper.protocol import ROUTING_KEY_HEADER, BranchMeta

# Module to run, and the arguments before the flags.
ROUTERS = {"smg": ("smg", "launch"), "sglang_router": ("sglang_router.launch_router",)}
BY_GROUP = ("--policy", "manual", "--assignment-mode", "min_group")
PREFIX = "A prefix that is long enough to be worth a request of its own. " * 2
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def replicas(taper_server: Server) -> Iterator[list[Server]]:
    with running_server(*EXACT) as second:
        yield [taper_server, second]


@contextlib.contextmanager
def running_router(name: str, replicas: list[Server], *flags: str) -> Iterator[str]:
    """The URL of a router that knows all `replicas`; skips where it is absent."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name.replace('_', '-')} is not installed (extra `test`)")
    port = free_port()
    command = [sys.executable, "-m", *ROUTERS[name], "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--prometheus-host", "127.0.0.1", "--worker-startup-check-interval=1"]
    # A lost replica is noticed within seconds.
    command += ["--health-check-interval-secs=1", "--health-failure-threshold=2"]
    command += ["--worker-urls", *(replica.url for replica in replicas), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(lambda: _num_workers(url) == len(replicas))
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _num_workers(url: str) -> int:
    with contextlib.suppress(requests.RequestException):
        workers = requests.get(f"{url}/workers", timeout=5).json()["workers"]
        return sum(worker["is_healthy"] for worker in workers)
    return 0


@pytest.fixture(scope="module")
def by_group(replicas: list[Server]) -> Iterator[str]:
    with running_router("smg", replicas, *BY_GROUP) as url:
        yield url


def homes_of(group: str, replicas: list[Server]) -> list[int]:
    """The replicas that have met the group."""
    known = [{g["group"] for g in r.state()["groups"]} for r in replicas]
    return [i for i, groups in enumerate(known) if group in groups]


async def _fork(url: str, group: str, suffixes: list[str]) -> list[StreamEvent]:
    async with TaperClient(url) as client:
        source = BranchMeta(group=group)
        async with client.fork(PREFIX, suffixes, GREEDY, source=source) as events:
            return [event async for event in events if event.finished]


def test_all_branches_of_a_fork_meet_on_one_replica_and_share_its_prefix(
    by_group: str, replicas: list[Server]
) -> None:
    found = set()
    for _ in range(4):
        group = new_group()
        ended = asyncio.run(_fork(by_group, group, ["\n1.", "\n2.", "\n3."]))
        assert sorted(event.branch for event in ended) == [0, 1, 2]
        for event in ended:
            answer = {"meta_info": event.meta_info}
            assert (meta_of(answer)["group"], meta_of(answer)["width"]) == (group, 3)
            assert meta_of(answer)["prefix_tokens_shared"] > 20
        (home,) = homes_of(group, replicas)
        found.add(home)
    assert found == {0, 1}


def test_a_later_stage_finds_the_replica_of_its_group(
    by_group: str, replicas: list[Server]
) -> None:
    group = new_group()
    asyncio.run(_fork(by_group, group, ["\n1.", "\n2."]))
    meta = {"group": group, "stage": 2}
    body = {"text": f"{PREFIX}\nSo", "sampling_params": dict(GREEDY)}
    body["sampling_params"]["custom_params"] = {"taper": meta}
    headers = {ROUTING_KEY_HEADER: group}
    answer = requests.post(f"{by_group}/generate", json=body, headers=headers).json()
    assert meta_of(answer)["prefix_tokens_shared"] > 20
    assert len(homes_of(group, replicas)) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_clients_name_their_group_in_body_and_header(
    by_group: str, replicas: list[Server], path: str
) -> None:
    group = new_group()
    asked = {"prompt": "Bees"}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "Bees"}]}  # type: ignore[dict-item]
    meta = {"custom_params": {"taper": {"group": group}}}
    body = {"model": "smollm2", "n": 3, "max_tokens": 4, **asked, **meta}
    for _ in range(2):
        headers = {ROUTING_KEY_HEADER: group}
        answer = requests.post(by_group + path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert [m["branch"] for m in answer.json()["metadata"]["taper"]] == [0, 1, 2]
    assert len(homes_of(group, replicas)) == 1


@pytest.mark.parametrize("router", ROUTERS)
def test_the_samples_of_one_call_are_branches_behind_either_router(
    replicas: list[Server], router: str
) -> None:
    body = {"text": "The harbour town", "sampling_params": {**GREEDY, "n": 3}}
    with running_router(router, replicas, *BY_GROUP) as url:
        answers = requests.post(f"{url}/generate", json=body).json()
    metas = [meta_of(answer) for answer in answers]
    assert [meta["branch"] for meta in metas] == [0, 1, 2]
    assert len(homes_of(metas[0]["group"], replicas)) == 1


def test_sglang_router_drops_the_metadata_of_generate_but_not_of_completions(
    replicas: list[Server],
) -> None:
    """docs/deployment.md says so; when it does not any more, the docs may say less."""
    group = new_group()
    taper = {"custom_params": {"taper": {"group": group}}}
    native = {"text": "Bees", "sampling_params": {**GREEDY, **taper}}
    openai = {"model": "smollm2", "prompt": "Bees", "max_tokens": 4, **taper}
    with running_router("sglang_router", replicas, *BY_GROUP) as url:
        headers = {ROUTING_KEY_HEADER: group}
        answer = requests.post(f"{url}/generate", json=native, headers=headers)
        assert answer.status_code == 200
        assert homes_of(group, replicas) == []
        for _ in range(3):
            requests.post(f"{url}/v1/completions", json=openai, headers=headers)
        assert len(homes_of(group, replicas)) == 1


def test_a_sglang_program_stays_together_by_its_prefix(replicas: list[Server]) -> None:
    @sgl.function
    def article(s: Any) -> None:
        s += PREFIX
        branches = s.fork(3)
        branches += lambda i: f"\n{i + 1}." + sgl.gen("fact", max_tokens=8)
        branches.join()

    known = [{g["group"] for g in r.state()["groups"]} for r in replicas]
    with running_router("smg", replicas, "--policy", "cache_aware") as url:
        for _ in range(2):
            article.run(backend=sglang_taper.RuntimeEndpoint(url))
    new = [
        {g["group"] for g in r.state()["groups"]} - old
        for r, old in zip(replicas, known, strict=True)
    ]
    assert len(new[0] | new[1]) == 2
    assert not new[0] & new[1]


def test_routes_of_ours_are_not_passed_on(by_group: str) -> None:
    for path in ("/taper/state", "/abort_request"):
        assert requests.post(by_group + path, json={"group": "g"}).status_code == 404


async def _until_lost(client: TaperClient, group: str, lost: asyncio.Event) -> str:
    """The error that a stream ends with after `lost`, or "finished"."""
    sampling = {**GREEDY, "max_new_tokens": 100}
    try:
        async for _ in client.generate_stream(
            PREFIX, sampling, meta=BranchMeta(group=group)
        ):
            lost.set()
    except ServerError as error:
        return str(error)
    return "finished"


def test_a_lost_replica_ends_its_branches_with_an_error_and_the_rest_go_on(
    by_group: str, replicas: list[Server]
) -> None:
    groups: dict[int, str] = {}
    while len(groups) < 2:
        group = new_group()
        asyncio.run(_fork(by_group, group, ["\n1.", "\n2."]))
        groups[homes_of(group, replicas)[0]] = group

    async def lose_the_second() -> list[str]:
        async with TaperClient(by_group, timeout_s=60) as client:
            begun = [asyncio.Event() for _ in range(4)]
            names = [groups[0], groups[0], groups[1], groups[1]]
            tasks = [
                asyncio.create_task(_until_lost(client, name, event))
                for name, event in zip(names, begun, strict=True)
            ]
            for event in begun:
                await asyncio.wait_for(event.wait(), 60)
            os.killpg(replicas[1].process.pid, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    ends = asyncio.run(lose_the_second())
    assert ends[:2] == ["finished", "finished"]
    assert all("Stream error" in end for end in ends[2:]), ends

    wait_for(lambda: _num_workers(by_group) == 1)
    ended = asyncio.run(_fork(by_group, groups[1], ["\n1.", "\n2."]))
    assert len(ended) == 2
    assert homes_of(groups[1], replicas[:1]) == [0]
