"""Cases of usage, logprobs and streams of several samples."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from forking import (
    Answer,
    assert_idle_pool,
    branch_of,
    ids_of,
    new_group,
    some_ids,
    stream,
)

from server import Server

NUM_CHOICES = 8
# About every fourth sampled token, so that samples end at lengths of their own.
STOPS = {"stop_token_ids": [*range(0, 49_152, 4)], "ignore_eos": False}
CHAT = {"messages": [{"role": "user", "content": "Name a few colours."}]}


@pytest.fixture(autouse=True)
def _every_token_accounted_for(taper_server: Server) -> Iterator[None]:
    taper_server.set_policy(policy="eager")
    taper_server.flush()
    yield
    assert_idle_pool(taper_server)


def openai(server: Server, **body: Any) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = server.post(path, {"model": "smollm2", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def openai_stream(server: Server, **body: Any) -> list[Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = server.post(path, {"model": "smollm2", **body}, stream=True)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def test_case_04_each_sample_of_a_stream_finishes_once(taper_server: Server) -> None:
    sampling = {"n": NUM_CHOICES, "temperature": 1.5, "max_new_tokens": 40, **STOPS}
    body = branch_of(new_group(), some_ids("unequal", 20), **sampling)
    events = list(stream(taper_server, body))
    ends = [e for e in events if e["meta_info"]["finish_reason"] is not None]
    assert Counter(e["index"] for e in ends) == dict.fromkeys(range(NUM_CHOICES), 1)
    assert len({len(event["output_ids"]) for event in ends}) > 1
    for event in ends:
        later = events[events.index(event) + 1 :]
        assert event["index"] not in {e["index"] for e in later}
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
        assert event["meta_info"]["taper"]["branch"] == event["index"]


@pytest.mark.parametrize("prompts", [1, 2])
def test_case_37_usage_has_a_prompt_once_and_all_completions(
    taper_server: Server, prompts: int
) -> None:
    ids = [some_ids(("usage", i), 20 + i) for i in range(prompts)]
    body: dict[str, Any] = {"prompt": ids if prompts > 1 else ids[0], "n": 3}
    body |= {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    wanted = {"prompt_tokens": sum(map(len, ids)), "completion_tokens": 18 * prompts}
    wanted["total_tokens"] = sum(wanted.values())
    usage = openai(taper_server, **body)["usage"]
    streamed = openai_stream(taper_server, **body)[-1]["usage"]
    assert {key: usage[key] for key in wanted} == wanted
    assert {key: streamed[key] for key in wanted} == wanted


def test_case_37_usage_of_a_chat_with_samples_has_the_prompt_of_one(
    taper_server: Server,
) -> None:
    body = {**CHAT, "max_tokens": 5, "ignore_eos": True}
    one = openai(taper_server, **body)["usage"]
    four = openai(taper_server, **body, n=4)["usage"]
    assert four["prompt_tokens"] == one["prompt_tokens"]
    assert four["completion_tokens"] == 4 * one["completion_tokens"] == 20


def test_case_68_unequal_choices_end_once_each_and_are_summed(
    taper_server: Server,
) -> None:
    body = {**CHAT, "n": NUM_CHOICES, "max_tokens": 40, "temperature": 1.5, **STOPS}
    answer = openai(taper_server, **body, logprobs=True)
    lengths = [len(c["logprobs"]["content"]) for c in answer["choices"]]
    assert len(set(lengths)) > 1
    assert answer["usage"]["completion_tokens"] == sum(lengths)
    chunks = openai_stream(taper_server, **body, logprobs=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = Counter(c["index"] for c in choices if c["finish_reason"])
    assert ends == dict.fromkeys(range(NUM_CHOICES), 1)
    sent = [c["logprobs"]["content"] for c in choices if c.get("logprobs")]
    # SGLang counts and does not stream a token that stops a choice, nor those of an
    # unfinished character before it.
    stopped = sum(choice["finish_reason"] == "stop" for choice in choices)
    counted, streamed = chunks[-1]["usage"]["completion_tokens"], sum(map(len, sent))
    assert streamed <= counted <= streamed + 4 * stopped


def logprobs_of(answer: Answer) -> list[tuple[float, int]]:
    """(logprob, token id) of each output token."""
    return [entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_case_38_streamed_logprobs_belong_to_the_tokens_of_their_sample(
    taper_server: Server,
) -> None:
    ids, asked = some_ids("aligned", 20), {"return_logprob": True}
    sampling = {"n": 3, "temperature": 1.2, "max_new_tokens": 10}
    body = branch_of(new_group(), ids, **sampling) | asked
    last = {event["index"]: event for event in stream(taper_server, body)}
    answers = [last[index] for index in range(3)]
    assert len({tuple(found) for found in ids_of(answers)}) > 1
    for answer in answers:
        assert [token for _, token in logprobs_of(answer)] == answer["output_ids"]
        assert all(value <= 0 for value, _ in logprobs_of(answer))


def test_case_38_logprobs_of_samples_are_those_of_one_request(
    taper_server: Server,
) -> None:
    ids, asked = some_ids("equal", 20), {"return_logprob": True, "top_logprobs_num": 2}
    alone = taper_server.generate({**branch_of(new_group(), ids), **asked})
    body = {**branch_of(new_group(), ids, n=3), **asked}
    streamed = {event["index"]: event for event in stream(taper_server, body)}
    for answer in (*taper_server.generate(body), *streamed.values()):
        for found, wanted in zip(logprobs_of(answer), logprobs_of(alone), strict=True):
            assert found[1] == wanted[1]
            assert math.isclose(found[0], wanted[0], abs_tol=1e-4)
        assert len(answer["meta_info"]["output_top_logprobs"]) == 8
