"""The asynchronous client against a recording server."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable

import pytest
from recorder import Recorder, meta_of

from sglang_taper.errors import FieldError
from sglang_taper.frontend.client import ServerError, TaperClient
from sglang_taper.frontend.connection import IDLE_S
from sglang_taper.protocol import BranchMeta, parse_branch_meta

LONG = "A prefix that is long enough to be worth a request of its own. " * 2


def ask(url: str, question: Callable[[TaperClient], Awaitable]):
    """The result of `question` asked through a client that is closed afterwards."""

    async def main():
        async with TaperClient(url) as client:
            return await asyncio.wait_for(question(client), 10)

    return asyncio.run(main())


async def texts(client: TaperClient, *args, **kwargs) -> dict[int, str]:
    found: dict[int, str] = defaultdict(str)
    async with client.fork(*args, **kwargs) as events:
        async for event in events:
            found[event.branch] += event.text
    return dict(found)


@pytest.mark.parametrize(("prompt", "key"), [("Hi", "text"), ([1, 2], "input_ids")])
def test_generate_sends_text_or_token_ids_with_parameters_untouched(
    recorder: Recorder, prompt, key
):
    answer = ask(recorder.url, lambda c: c.generate(prompt, {"temperature": 0}))
    (body,) = recorder.bodies()
    assert answer["text"] == " out"
    assert body[key] == prompt
    assert body["sampling_params"] == {"temperature": 0}


def test_slos_without_a_group_may_go_with_a_plain_request(recorder):
    ask(recorder.url, lambda c: c.generate("Hi", meta=BranchMeta(tpot_slo_ms=20.0)))
    assert recorder.metas() == [{"tpot_slo_ms": 20.0}]


def test_a_stream_yields_only_what_is_new_and_tells_its_last_event(recorder):
    async def question(client):
        return [event async for event in client.generate_stream("Hi")]

    events = ask(recorder.url, question)
    assert [event.text for event in events] == [" ou", "t"]
    assert [event.finished for event in events] == [False, True]


def test_a_fork_streams_every_branch_of_one_group(recorder):
    suffixes = [" a", " b", " c"]
    found = ask(recorder.url, lambda c: texts(c, LONG, suffixes, {"temperature": 0}))
    assert found == {0: " out", 1: " out", 2: " out"}
    commit, *children = recorder.bodies()
    assert commit["sampling_params"]["max_new_tokens"] == 0
    metas = [parse_branch_meta(meta_of(child)) for child in children]
    group = meta_of(commit)["group"]
    assert {
        m.branch: (m.group, m.width, m.depth, m.stage, m.parent) for m in metas
    } == dict.fromkeys(range(3), (group, 3, 1, 1, commit["rid"]))
    assert sorted(child["text"] for child in children) == [LONG + s for s in suffixes]


def test_everything_of_a_group_carries_the_key_by_which_routers_keep_it_together(
    recorder,
):
    async def question(client):
        await texts(client, LONG, [" a", " b"], source=BranchMeta(group="g"))
        await client.abort_group("g")

    ask(recorder.url, question)
    assert recorder.routing_keys == ["g"] * 4


def test_a_request_of_no_group_carries_no_routing_key(recorder):
    ask(recorder.url, lambda c: c.generate("Hi", {"custom_params": None}))
    ask(recorder.url, lambda c: c.set_policy(policy="off"))
    assert recorder.routing_keys == [None, None]


@pytest.mark.parametrize(
    ("prompt", "kwargs"), [("Short", {}), (LONG, {"commit_prefix": False})]
)
def test_a_short_prefix_or_one_that_need_not_be_is_not_committed(
    recorder, prompt, kwargs
):
    ask(recorder.url, lambda c: texts(c, prompt, [" a", " b"], **kwargs))
    assert len(recorder.bodies()) == 2


def test_a_second_fork_of_a_request_is_its_next_stage(recorder):
    source = BranchMeta(group="g", stage=1, priority=3.0)
    ask(recorder.url, lambda c: texts(c, [1], [[2], [3]], source=source))
    assert sorted(body["input_ids"] for body in recorder.bodies()) == [[1, 2], [1, 3]]
    for meta in recorder.metas():
        assert (meta["group"], meta["stage"], meta["priority"]) == ("g", 2, 3.0)


def test_leaving_a_fork_early_aborts_exactly_what_is_unfinished(recorder):
    async def question(client):
        async with client.fork("Hi", [" short", " endless", " endless too"]) as events:
            async for event in events:
                if event.finished:
                    break

    ask(recorder.url, question)
    endless = {b["rid"] for b in recorder.bodies() if "endless" in b["text"]}
    assert recorder.aborted == endless


def test_closing_a_stream_early_aborts_its_request(recorder):
    async def question(client):
        stream = client.generate_stream("endless", rid="mine/")
        async with contextlib.aclosing(stream) as events:
            await anext(events)

    ask(recorder.url, question)
    assert recorder.aborted == {"mine/"}


def test_a_cancelled_consumer_aborts_its_branches(recorder):
    async def question(client):
        task = asyncio.create_task(texts(client, "Hi", [" endless", " endless 2"]))
        while len(recorder.bodies()) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ask(recorder.url, question)
    assert recorder.aborted == {body["rid"] for body in recorder.bodies()}


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "width=0 is not valid"}},
        {"error": "width=0 is not valid"},
        {"message": "width=0 is not valid", "type": "BadRequest"},
        {"detail": "width=0 is not valid"},
    ],
)
@pytest.mark.parametrize("call", ["generate", "fork", "set_policy"])
def test_a_refusal_is_an_error_with_the_servers_message(recorder, answer, call):
    recorder.refuse_with = (400, answer)
    calls = {
        "generate": lambda c: c.generate("Hi"),
        "fork": lambda c: texts(c, "Hi", [" a", " b"]),
        "set_policy": lambda c: c.set_policy(cap=0),
    }
    with pytest.raises(ServerError, match=r"^width=0 is not valid$") as caught:
        ask(recorder.url, calls[call])
    assert caught.value.status == 400


def test_a_server_that_is_gone_is_an_error_naming_its_address():
    url = "http://127.0.0.1:9"
    with pytest.raises(ServerError, match=url) as caught:
        ask(url, lambda c: texts(c, "Hi", [" a"]))
    assert caught.value.status is None


def test_a_fork_without_branches_is_refused_by_name(recorder):
    with pytest.raises(FieldError, match=r"fork\.width=0"):
        ask(recorder.url, lambda c: texts(c, "Hi", []))


def test_state_policy_and_group_abort_use_the_routes_of_the_server(recorder):
    async def question(client):
        await client.abort_group("g")
        return await client.state(), await client.set_policy(policy="cap", cap=2)

    state, changed = ask(recorder.url, question)
    assert (state["policy"], changed["policy"]) == ("taper", "cap")
    assert recorder.requests == [
        ("/abort_request", {"group": "g"}),
        ("/taper/state", {}),
        ("/taper/policy", {"policy": "cap", "cap": 2}),
    ]


def test_an_idle_connection_is_given_up_before_sglang_closes_it():
    from sglang.srt.environ import envs

    assert envs.SGLANG_TIMEOUT_KEEP_ALIVE.get() > IDLE_S
