"""`first_k`: when enough branches have finished, the others end at once, and say so."""

from __future__ import annotations

import uuid
from typing import Any

import openai
import pytest
from fork_calls import GREEDY, LONG, by_branch, call, events, finals, fork, generated
from forking import assert_idle_pool, branch_of, ids_of, reason_of, some_ids, together
from workload import STORY

from server import Server

# Siblings of one length take turns with this policy, so that one is the first.
ONE_AT_A_TIME = {"policy": "off"}


@pytest.fixture(autouse=True)
def _idle_at_both_ends(taper_server: Server) -> Any:
    taper_server.set_policy(**ONE_AT_A_TIME)
    taper_server.flush()
    yield
    assert_idle_pool(taper_server)


def samples(width: int, first_k: int, **sampling: Any) -> dict[str, Any]:
    params = {**GREEDY, "n": width, "custom_params": {"taper": {"first_k": first_k}}}
    return {"text": STORY, "sampling_params": {**params, **sampling}}


def assert_cancelled(meta_info: dict[str, Any], first_k: int, width: int) -> None:
    """It says why it ended, and that this was not by itself."""
    reason = meta_info["finish_reason"]
    assert reason["type"] == "abort"
    assert reason["message"] == f"first_k: {first_k} of {width} branches have finished"
    taper = meta_info.get("taper")
    assert taper is None or taper["cancelled_by"] == "first_k"


def test_the_first_samples_of_n_cancel_the_others(taper_server: Server) -> None:
    answers = taper_server.generate(samples(4, 2))
    infos = [answer["meta_info"] for answer in answers]
    assert [info["finish_reason"]["type"] for info in infos] == [
        *("length", "length", "abort", "abort"),
    ]
    for info in infos[2:]:
        assert_cancelled(info, 2, 4)
        # They took turns, so they are nearly as long; all they wrote is there.
        assert 9 <= info["completion_tokens"] <= 12
    assert all(info["taper"]["cancelled_by"] is None for info in infos[:2])
    alone = generated(taper_server, STORY)["text"]
    assert all(alone.startswith(answer["text"]) for answer in answers)
    assert [len(ids) for ids in ids_of(answers)] == [
        info["completion_tokens"] for info in infos
    ]


def test_what_runs_is_cancelled_within_a_step_or_two(taper_server: Server) -> None:
    taper_server.set_policy(policy="eager")
    group, ids = uuid.uuid4().hex, some_ids("at once", 20)
    bodies = [
        branch_of(group, ids, i, 3, max_new_tokens=10 if i == 1 else 400)
        for i in range(3)
    ]
    for body in bodies:
        body["sampling_params"]["custom_params"]["taper"]["first_k"] = 1
    answers = together(taper_server, bodies)
    assert [reason_of(a) for a in answers] == ["abort", "length", "abort"]
    for answer in (answers[0], answers[2]):
        assert_cancelled(answer["meta_info"], 1, 3)
        assert answer["meta_info"]["completion_tokens"] <= 30


def test_a_sibling_that_comes_too_late_is_cancelled(taper_server: Server) -> None:
    group, ids = uuid.uuid4().hex, some_ids("late", 20)
    first, late = (branch_of(group, ids, i, 2, depth=1) for i in range(2))
    for body in (first, late):
        body["sampling_params"]["custom_params"]["taper"]["first_k"] = 1
    assert reason_of(taper_server.generate(first)) == "length"
    answer = taper_server.generate(late)
    assert_cancelled(answer["meta_info"], 1, 2)
    assert answer["meta_info"]["completion_tokens"] <= 1


def test_samples_that_have_no_row_yet_are_cancelled_in_the_queue(
    taper_server: Server,
) -> None:
    """40 samples, 32 rows: the ones left over never run."""
    answers = taper_server.generate(samples(40, 1, max_new_tokens=3))
    infos = [answer["meta_info"] for answer in answers]
    finished = [i for i in infos if i["finish_reason"]["type"] == "length"]
    assert len(finished) == 1
    for info in infos:
        if info not in finished:
            assert_cancelled(info, 1, 40)
    waited = [info for info in infos if info["completion_tokens"] == 0]
    assert waited
    assert {info["prompt_tokens"] for info in infos} == {finished[0]["prompt_tokens"]}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_clients_ask_for_it_by_extra_body(
    taper_server: Server, chat: bool, stream: bool
) -> None:
    client = openai.OpenAI(api_key="none", base_url=taper_server.url + "/v1")
    common: dict[str, Any] = {
        "model": "smollm2",
        "n": 4,
        "max_tokens": 12,
        "temperature": 0,
        "stream": stream,
        "extra_body": {
            "ignore_eos": True,
            "custom_params": {"taper": {"first_k": 1}},
        },
    }
    if stream:
        common["stream_options"] = {"include_usage": True}
    if chat:
        messages: list[Any] = [{"role": "user", "content": STORY}]
        answer = client.chat.completions.create(messages=messages, **common)
    else:
        answer = client.completions.create(prompt=STORY, **common)
    chunks = [*answer] if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    ends = {c.index: c.finish_reason for c in choices if c.finish_reason}
    assert sorted(ends.values()) == ["abort", "abort", "abort", "length"]
    usage = chunks[-1].usage
    assert usage.prompt_tokens > 20
    # The first has all of its tokens, the others have taken turns with it.
    assert 12 + 3 * 9 <= usage.completion_tokens <= 4 * 12
    if not stream:
        told = [meta["cancelled_by"] for meta in answer.metadata["taper"]]
        assert sorted(map(str, told)) == ["None", *["first_k"] * 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_fork_ends_with_its_first_branches(
    taper_server: Server, stream: bool
) -> None:
    taper_server.set_policy(policy="eager")
    branches = [
        {"text": " A", "sampling_params": {"max_new_tokens": 8}},
        {"text": " B"},
        {"text": " C", "sampling_params": {"max_new_tokens": 8}},
        {"text": " D"},
    ]
    join = {"text": " So", "sampling_params": {"max_new_tokens": 4}}
    body = call(STORY, branches, sampling_params=LONG, first_k=2, join=join)
    if stream:
        received = [*events(taper_server, body)]
        found, summary = finals(received), received[-1]
        joined = by_branch(received)[None][-1]
    else:
        summary = fork(taper_server, body)
        found, joined = summary["branches"], summary["join"]
    ends = [branch["finish_reason"]["type"] for branch in found]
    assert ends == ["length", "abort", "length", "abort"]
    for branch in (found[1], found[3]):
        assert_cancelled(branch["meta_info"], 2, 4)
        assert branch["meta_info"]["completion_tokens"] < 40
    assert summary["taper"]["num_finished"] == 2
    told = sum(b["meta_info"]["completion_tokens"] for b in (*found, joined))
    assert summary["usage"]["completion_tokens"] == told
    # Only what has finished is joined, and the first of it is in the tree.
    text = STORY + " A" + found[0]["text"] + " C" + found[2]["text"] + " So"
    alone = generated(taper_server, text, max_new_tokens=4)
    assert joined["text"] == alone["text"]


def test_the_kv_of_the_cancelled_is_free_for_the_next_request(
    taper_server: Server,
) -> None:
    """Four branches may become 1,600 tokens; what they held comes back at once."""
    taper_server.set_policy(policy="eager")
    short = {"text": " A", "sampling_params": {"max_new_tokens": 5}}
    branches = [short, *({"text": f" {i}"} for i in range(3))]
    fork(taper_server, call(STORY, branches, sampling_params=LONG, first_k=1))
    state = assert_idle_pool(taper_server)
    assert state["pool"]["protected"] == 0
    assert state["num_pins"] == 0
