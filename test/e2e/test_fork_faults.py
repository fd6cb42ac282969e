"""`POST /fork` when something is wrong: refusals by name, siblings that go on, aborts,
clients that leave. The pool is whole after each."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests as http
from fork_calls import GREEDY, LONG, call, events, finals, fork, generated, reasons
from forking import wait_for
from workload import STORY

from server import Server

HUGE = "word " * 20_000  # more than the model's context


pytestmark = pytest.mark.usefixtures("eager_and_idle")


def with_params(**params: Any) -> dict[str, Any]:
    return call(STORY, [" A"], sampling_params=params)


def with_branch(**branch: Any) -> dict[str, Any]:
    return call(STORY, [" A", branch])


REFUSED: list[tuple[Any, list[str]]] = [
    ([1], ["body=[1]", "object"]),
    ({"branches": [{}]}, ["body=[]", "exactly one of text, input_ids"]),
    (call(STORY, [{}], input_ids=[1]), ["body=['text', 'input_ids']", "exactly one"]),
    ({"text": STORY}, ["body.branches=None", "required"]),
    (call("", [{}]), ["body.text=''", "at least one token"]),
    (call({"input_ids": []}, [{}]), ["body.input_ids=[]", "at least one token"]),
    (call({"input_ids": ["1"]}, [{}]), ["body.input_ids[0]='1'", "integer"]),
    (call({"input_ids": [1, True]}, [{}]), ["body.input_ids[1]=True", "integer"]),
    (call({"input_ids": [1, -5]}, [{}]), ["body.input_ids[1]=-5", "0 to 49151"]),
    (with_branch(input_ids=[49152]), ["branches[1].input_ids[0]=49152", "0 to 49151"]),
    (call(STORY, [{}], join={"input_ids": [2**40]}), ["body.join.input_ids[0]="]),
    (call({"text": 7}, [{}]), ["body.text=7", "a valid string"]),
    (call(STORY, []), ["body.branches=0", "1 to 4096"]),
    (call(STORY, [{}] * 4097), ["body.branches=4097", "1 to 4096"]),
    (call(STORY, [{}]) | {"branches": {}}, ["body.branches={}", "a valid list"]),
    (call(STORY, [{}]) | {"branches": [3]}, ["body.branches[0]=3", "object"]),
    (call(STORY, [{}], strem=True), ["body.strem=True", "known keys are text,"]),
    (call(STORY, [{}], stream="yes"), ["body.stream='yes'", "boolean"]),
    (with_branch(txt="a"), ["body.branches[1].txt='a'", "known keys are text,"]),
    (with_branch(text=5), ["body.branches[1].text=5", "a valid string"]),
    (with_branch(text="a", input_ids=[1]), ["body.branches[1].input_ids=[1]"]),
    (with_branch(rid=""), ["body.branches[1].rid=''", "at least 1 character"]),
    (
        with_branch(top_logprobs_num=-1),
        ["branches[1].top_logprobs_num=-1", "equal to 0"],
    ),
    (with_branch(sampling_params=[]), ["body.branches[1].sampling_params=[]"]),
    (
        with_branch(sampling_params={"temperature": -1}),
        ["body.branches[1].sampling_params=", "temperature", "non-negative", "-1"],
    ),
    (
        with_branch(sampling_params={"no_such": 1}),
        ["body.branches[1].sampling_params=", "no_such"],
    ),
    (with_branch(sampling_params={"n": 2}), ["branches[1].sampling_params.n=2", "1:"]),
    (with_params(top_p=2), ["body.sampling_params=", "top_p must be in (0, 1]"]),
    (with_params(stop_regex="("), ["body.sampling_params=", "unterminated"]),
    (with_params(stop=5), ["body.sampling_params=", "stop"]),
    (with_params(beam_width=2), ["body.sampling_params.beam_width=2"]),
    (with_params(custom_params=[1]), ["custom_params=[1]", "an object"]),
    (
        with_params(custom_params={"taper": {"group": "g"}}),
        ["body.sampling_params.custom_params.taper=", "the server writes it"],
    ),
    (call(STORY, [{}, {}], first_k=3), ["body.first_k=3", "number of branches, 2"]),
    (call(STORY, [{}], first_k=2), ["body.first_k=2", "number of branches, 1"]),
    (call(STORY, [{}, {}], first_k=0), ["body.first_k=0", "from 1 to 4096"]),
    (call(STORY, [{}], tpot_slo_ms=-1.0), ["body.tpot_slo_ms=-1.0", "above 0"]),
    (call(STORY, [{}], group="a b"), ["body.group='a b'", "1 to 128 characters"]),
    (call({"rid": "nobody"}, [{}]), ["body.rid='nobody'", "a request that runs"]),
    (call({"rid": "r"}, [{}], group="g"), ["body.group='g'", "absent where rid"]),
    (call({"messages": []}, [{}]), ["body.messages=[]", "essages"]),
    (call({"messages": [{"role": 1}]}, [{}]), ["body.messages=["]),
    (
        call(
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, [{}]
        ),
        ["body.messages[0].content=", "a text"],
    ),
    (call(STORY, [{}], join={"n": 1}), ["body.join.n=1", "known keys are"]),
    (
        call(STORY, [{"rid": "x"}], join={"rid": "x"}),
        ["body.join.rid='x'", "an id of its own"],
    ),
    # Only SGLang knows these, and every branch has them.
    (call(HUGE, [{}]), ["branches[0]", "context length"]),
]


@pytest.mark.parametrize(("body", "parts"), REFUSED)
def test_a_call_that_is_not_acceptable_is_a_400_by_name(
    taper_server: Server, body: Any, parts: list[str]
) -> None:
    bodies = [body]
    if isinstance(body, dict) and "stream" not in body:
        bodies.append({**body, "stream": True})
    for one in bodies:
        answer = taper_server.post("/fork", one)
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert all(part in message for part in parts), message
        assert len(message) < 2000


@pytest.mark.parametrize("body", [b"", b"{", b"not json", b'{"text": "a", }', b"\xff"])
def test_a_body_that_is_no_json_is_a_400(taper_server: Server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = taper_server.post("/fork", data=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("body")


def test_a_rid_in_use_is_refused_and_its_owner_goes_on(taper_server: Server) -> None:
    rid = uuid.uuid4().hex
    body = call(STORY, [{"rid": rid}], sampling_params={**LONG, "max_new_tokens": 60})
    stream = events(taper_server, body)
    next(stream)
    answer = taper_server.post("/fork", call(STORY, [{"rid": rid}]))
    assert answer.status_code == 400
    assert rid in answer.text
    assert reasons(finals([*stream])) == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_branch_that_is_refused_does_not_take_its_siblings(
    taper_server: Server, stream: bool
) -> None:
    branches = [
        {"text": " A"},
        {"text": HUGE},
        {"text": " C", "sampling_params": {"regex": "(unclosed"}},
        {"text": " D", "sampling_params": {"json_schema": "{"}},
        {"text": " E"},
    ]
    body = call(STORY, branches)
    if stream:
        received = [*events(taper_server, body)]
        found, summary = finals(received), received[-1]
    else:
        summary = fork(taper_server, body)
        found = summary["branches"]
    assert reasons(found) == ["length", "abort", "abort", "abort", "length"]
    for branch in found[1:4]:
        assert branch["finish_reason"]["status_code"] == 400
    assert "context length" in found[1]["finish_reason"]["message"]
    for text, branch in ((" A", found[0]), (" E", found[4])):
        assert branch["text"] == generated(taper_server, STORY + text)["text"]
    assert summary["taper"]["num_finished"] == 2
    assert summary["usage"]["completion_tokens"] >= 24


# -- aborts


def long_call(width: int = 4, **fields: Any) -> dict[str, Any]:
    branches = [{"text": f" {i}", "rid": uuid.uuid4().hex} for i in range(width)]
    return call(STORY, branches, **{"sampling_params": LONG, **fields})


def begin(server: Server, body: dict[str, Any], count: int = 12) -> tuple[Any, list]:
    """The stream of a fork, and its first events."""
    stream = events(server, body)
    return stream, [next(stream) for _ in range(count)]


def test_an_abort_by_id_ends_one_branch(taper_server: Server) -> None:
    body = long_call(sampling_params={**LONG, "max_new_tokens": 80})
    stream, begun = begin(taper_server, body)
    rid = body["branches"][2]["rid"]
    assert taper_server.post("/abort_request", {"rid": rid}).status_code == 200
    received = [*begun, *stream]
    found = finals(received)
    assert reasons(found) == ["length", "length", "abort", "length"]
    assert found[2]["meta_info"]["completion_tokens"] < 80
    told = sum(event["meta_info"]["completion_tokens"] for event in found)
    assert received[-1]["usage"]["completion_tokens"] == told


def test_an_abort_of_the_group_ends_every_branch_and_the_join_does_not_begin(
    taper_server: Server,
) -> None:
    group = uuid.uuid4().hex
    body = long_call(group=group, join={"text": " So"})
    stream, begun = begin(taper_server, body)
    assert taper_server.post("/abort_request", {"group": group}).status_code == 200
    received = [*begun, *stream]
    assert reasons(finals(received)) == ["abort"] * 4
    joined = [event for event in received if event.get("branch", 0) is None]
    assert [event["finish_reason"]["message"] for event in joined] == [
        "no branch has finished"
    ]
    assert received[-1]["taper"]["num_finished"] == 0


def test_a_client_that_leaves_cancels_all_branches(taper_server: Server) -> None:
    body = long_call()
    stream, _ = begin(taper_server, body)
    assert taper_server.state()["num_running"] == 4
    stream.close()
    wait_for(lambda: taper_server.state()["num_running"] == 0, seconds=5)


def test_a_client_that_leaves_while_waiting_cancels_all_branches(
    taper_server: Server,
) -> None:
    with pytest.raises(http.ReadTimeout):
        taper_server.post("/fork", long_call(), timeout=1)
    # SGLang looks for a client that waits for one object every few seconds.
    wait_for(lambda: taper_server.state()["num_running"] == 0, seconds=8)


def test_a_client_that_leaves_before_the_join_starts_none(taper_server: Server) -> None:
    before = taper_server.state()["counters"]["num_branches"]
    body = long_call(2, join={"text": " So"})
    stream, _ = begin(taper_server, body)
    stream.close()
    wait_for(lambda: taper_server.state()["num_running"] == 0, seconds=5)
    assert taper_server.state()["counters"]["num_branches"] == before + 2


def test_more_branches_than_slots_all_end_once(taper_server: Server) -> None:
    body = call(STORY, [f" {i}" for i in range(48)])
    received = [*events(taper_server, body)]
    found = finals(received)
    assert len(found) == 48
    assert set(reasons(found)) == {"length"}
    assert received[-1]["usage"]["completion_tokens"] == 48 * 12


def test_many_clients_at_once_get_every_event_of_their_own(
    taper_server: Server,
) -> None:
    def one(number: int) -> list[str]:
        few = {**GREEDY, "max_new_tokens": 6}
        prompt = f"Client {number} asks:"
        body = call(prompt, [" a", " b", " c"], sampling_params=few)
        return [event["text"] for event in finals([*events(taper_server, body)])]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
    assert together == [one(number) for number in range(8)]


@pytest.mark.parametrize("attempt", range(3))
def test_an_abort_of_the_group_before_the_join_is_for_the_join_too(
    taper_server: Server, attempt: int
) -> None:
    """The join's prompt takes a while to make, and until then it is no member."""
    group = f"aborted-before-its-join-{attempt}"
    params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    join = {"text": "\nSo", "sampling_params": {"max_new_tokens": 200}}
    body = {
        "text": "long text " * 1200,
        "branches": [{"text": "\n0."}, {"text": "\n1."}],
        "sampling_params": params,
        "group": group,
        "join": join,
        "stream": True,
    }
    ended: dict[int | None, Any] = {}
    for event in events(taper_server, body):
        if (reason := event.get("finish_reason")) is not None:
            ended[event["branch"]] = reason
            if len(ended) == 2:
                aborted = taper_server.post("/abort_request", {"group": group})
                assert aborted.status_code == 200
    assert [ended[branch]["type"] for branch in (0, 1)] == ["length", "length"]
    assert ended[None]["type"] == "abort"
