"""The asynchronous client's `fork_once` and `fork_stream`, against the real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from fork_calls import GREEDY, LONG, generated, ids_of_text
from forking import wait_for
from workload import STORY, TOPICS

from server import Server
from sglang_taper.frontend.client import ServerError, TaperClient
from sglang_taper.frontend.server_fork import BranchProgress

pytestmark = pytest.mark.usefixtures("eager_and_idle")


def ask(server: Server, question: Callable[[TaperClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with TaperClient(server.url) as client:
            return await asyncio.wait_for(question(client), 120)

    return asyncio.run(main())


def test_a_fork_at_once_has_a_text_for_each_branch(taper_server: Server) -> None:
    result = ask(taper_server, lambda c: c.fork_once(STORY, TOPICS, GREEDY))
    alone = [generated(taper_server, STORY + topic)["text"] for topic in TOPICS]
    assert result.texts == alone
    assert result.usage["completion_tokens"] == len(TOPICS) * GREEDY["max_new_tokens"]
    assert result.taper["width"] == len(TOPICS)


def test_prompts_and_branches_may_be_ids_messages_or_requests(
    taper_server: Server,
) -> None:
    ids = ids_of_text(taper_server, STORY)

    async def question(client: TaperClient) -> Any:
        first = await client.fork_once(ids, [[11, 12], " and"], GREEDY)
        rid = first.branches[0]["rid"]
        again = await client.fork_once({"rid": rid}, [{}], GREEDY, tpot_slo_ms=90)
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        return first, again, await client.fork_once(chat, [" It"], GREEDY)

    first, again, chat = ask(taper_server, question)
    expected = [*ids, 11, 12, *first.branches[0]["output_ids"]]
    assert again.branches[0]["meta_info"]["prompt_tokens"] == len(expected)
    alone = generated(taper_server, expected)
    assert again.branches[0]["output_ids"] == alone["output_ids"]
    assert chat.branches[0]["finish_reason"]["type"] == "length"


def test_a_stream_yields_what_is_new_and_ends_with_the_counts(
    taper_server: Server,
) -> None:
    async def question(client: TaperClient) -> Any:
        texts = [""] * 2
        ends = 0
        join = {"text": " So", "sampling_params": {"max_new_tokens": 5}}
        stream = client.fork_stream(STORY, [" A", " B"], GREEDY, join=join)
        async with stream as events:
            async for event in events:
                ends += event.finished
                if event.branch is not None:
                    texts[event.branch] += event.text
        return events, texts, ends

    events, texts, ends = ask(taper_server, question)
    assert texts == [generated(taper_server, STORY + b)["text"] for b in (" A", " B")]
    assert [branch.text for branch in events.branches] == texts
    assert ends == 3
    assert events.join.meta_info["completion_tokens"] == 5
    assert events.usage["completion_tokens"] == 2 * 12 + 5


def test_a_function_of_the_texts_says_what_to_cancel(taper_server: Server) -> None:
    def all_but_the_longest(branches: Sequence[BranchProgress]) -> list[int]:
        if max(len(branch.text) for branch in branches) < 60:
            return []
        best = max(range(len(branches)), key=lambda i: len(branches[i].text))
        return [i for i in range(len(branches)) if i != best]

    async def question(client: TaperClient) -> Any:
        params = {**LONG, "max_new_tokens": 120}
        stream = client.fork_stream(STORY, TOPICS, params, cancel=all_but_the_longest)
        async with stream as events:
            async for _ in events:
                pass
        return events

    events = ask(taper_server, question)
    ends = [branch.finish_reason["type"] for branch in events.branches]
    assert ends.count("abort") >= len(TOPICS) - 2
    for branch in events.branches:
        if branch.finish_reason["type"] == "abort":
            assert branch.meta_info["completion_tokens"] < 120
    told = sum(branch.meta_info["completion_tokens"] for branch in events.branches)
    assert events.usage["completion_tokens"] == told


def test_leaving_the_block_cancels_what_runs(taper_server: Server) -> None:
    async def question(client: TaperClient) -> None:
        async with client.fork_stream(STORY, TOPICS, LONG) as events:
            async for _ in events:
                if len(events.branches[0].text) > 20:
                    break

    ask(taper_server, question)
    began = time.monotonic()
    wait_for(lambda: taper_server.state()["num_running"] == 0, seconds=5)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_an_error_with_the_servers_message(
    taper_server: Server, stream: bool
) -> None:
    async def question(client: TaperClient) -> None:
        if stream:
            async with client.fork_stream(STORY, [" A"], first_k=2) as events:
                async for _ in events:
                    pass
        else:
            await client.fork_once(STORY, [" A"], first_k=2)

    with pytest.raises(ServerError, match=r"body\.first_k=2 is not valid") as caught:
        ask(taper_server, question)
    assert caught.value.status == 400
