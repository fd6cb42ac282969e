"""Front ends on a real server: what a client-side run gets, on every route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_end_clients import SOURCE, Client

from distribution import documented, write_distribution
from server import EXACT, Server, running_server

PROMPT = "Ways to spend a day by the sea.\n"
# Written in the form that the model is to go on with.
IN_THE_MIDDLE = """<Parallel>
<Outlines>
<Outline> 1: bread</Outline>
<Outline> 2: milk</Outline>
</Outlines>
<Thread>
1: Rye bread is dark.</Thread><Thread>
2: Milk is white.</Thread>
</Parallel>
So far for food.

<Parallel>
<Outlines>
<Outline> 1: rain</Outline>
<Outline> 2: snow</Outline>
"""
SAMPLING = {"temperature": 0, "max_new_tokens": 48}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that finds the documented extensions, and front ends for these tests."""
    folder: Path = tmp_path_factory.mktemp("site")
    files, points = documented()
    points["sglang_taper.front_ends"] += [
        "endless = of_tests:Endless",
        "broken = of_tests:Broken",
    ]
    write_distribution(folder, {**files, "of_tests": SOURCE}, points)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    policy = ("--branch-policy", "small-batch")
    with running_server(*EXACT, *policy, env=env) as running:
        yield running


def body_for(front_end: str, prompt: str = PROMPT, **changes: Any) -> dict[str, Any]:
    meta = {"front_end": front_end}
    params = {**SAMPLING, "custom_params": {"taper": meta}}
    return {"text": prompt, "sampling_params": params, **changes}


def stream(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post("/generate", {**body, "stream": True}, stream=True)
    lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def widths(answer: dict[str, Any]) -> list[int]:
    parts = answer["meta_info"]["front_end"]["parts"]
    return [width for _, width in sorted({(p["stage"], p["width"]) for p in parts})]


def test_a_policy_of_the_users_own_serves(server: Server) -> None:
    state = server.state()
    assert state["params"]["policy"] == "small-batch"
    assert server.set_policy(policy="off")["params"]["policy"] == "off"
    assert server.set_policy(policy="small-batch")["params"]["policy"] == "small-batch"


@pytest.mark.parametrize("policy", ["small-batch", "off"])
def test_threads_are_those_of_a_client_side_run(server: Server, policy: str) -> None:
    server.set_policy(policy=policy)
    served = server.generate(body_for("threadweaver", IN_THE_MIDDLE))
    server.set_policy(policy="small-batch")
    client = Client(server, IN_THE_MIDDLE, SAMPLING["max_new_tokens"])
    client.threadweaver()
    assert served["text"] == client.text
    assert served["output_ids"] == client.ids
    # The model itself closes the outline.
    assert widths(served)[:2] == [1, 2], served["text"]
    parts = served["meta_info"]["front_end"]["parts"]
    facts = [part["taper"] for part in parts if part["width"] == 2]
    assert {fact["width"] for fact in facts} == {2}
    deferred = sum(fact["steps_deferred"] for fact in facts)
    assert (deferred > 0) is (policy == "off")


def test_a_prompt_without_tags_is_answered_as_ever(server: Server) -> None:
    served = server.generate(body_for("threadweaver"))
    plain = server.generate({"text": PROMPT, "sampling_params": SAMPLING})
    assert served["text"] == plain["text"]
    for key in ("prompt_tokens", "completion_tokens", "finish_reason"):
        assert served["meta_info"][key] == plain["meta_info"][key]


def test_a_skeleton_is_that_of_a_client_side_run(server: Server) -> None:
    body = body_for("skeleton-of-thought")
    body["sampling_params"]["max_new_tokens"] = 240
    served = server.generate(body)
    client = Client(server, PROMPT, 240)
    client.skeleton()
    assert served["text"] == client.text
    assert served["output_ids"] == client.ids
    assert widths(served)[0] == 1
    # The grammar asks for three; this model says the same twice.
    assert widths(served)[1] >= 2


def test_a_stream_is_in_order_and_says_what_each_branch_writes(server: Server) -> None:
    whole = server.generate(body_for("endless"))
    *events, last = stream(server, body_for("endless"))
    assert last["text"] == whole["text"]
    assert last["output_ids"] == whole["output_ids"]
    assert last["meta_info"]["finish_reason"] is not None
    for before, after in zip(events, [*events[1:], last], strict=True):
        assert before["meta_info"]["finish_reason"] is None
        assert after["text"].startswith(before["text"])
    facts = [event["meta_info"]["front_end"] for event in events]
    written = ["".join(f["text"] for f in facts if f["branch"] == b) for b in (0, 1)]
    assert "".join(written) == whole["text"]
    ended = [f["branch"] for f in facts if f["finish_reason"] is not None]
    assert sorted(ended) == [0, 1]
    # Branches come at the same time: both have begun before the first has ended.
    first_end = [f["finish_reason"] is not None for f in facts].index(True)
    assert {f["branch"] for f in facts[:first_end]} == {0, 1}


def test_openai_clients_name_it_in_a_header(server: Server) -> None:
    body = {"model": "smollm2", "prompt": IN_THE_MIDDLE, "temperature": 0}
    body["max_tokens"] = SAMPLING["max_new_tokens"]
    headers = {"x-taper-front-end": "threadweaver"}
    whole = server.post("/v1/completions", body, headers=headers).json()
    expected = server.generate(body_for("threadweaver", IN_THE_MIDDLE))
    assert whole["choices"][0]["text"] == expected["text"]
    usage, info = whole["usage"], expected["meta_info"]
    assert usage["completion_tokens"] == info["completion_tokens"]
    streamed = server.post(
        "/v1/completions", {**body, "stream": True}, headers=headers, stream=True
    )
    texts = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in streamed.iter_lines()
        if line.startswith(b"data: {")
    ]
    assert "".join(texts) == expected["text"]


def test_chat_has_front_ends_too(server: Server) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name birds."}],
        "temperature": 0,
        "max_tokens": 240,
        "custom_params": {"taper": {"front_end": "two-views"}},
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    assert "For:" in content
    assert "\nAgainst:" in content


def test_the_documented_front_end_serves(server: Server) -> None:
    answer = server.generate(body_for("two-views"))
    assert answer["text"].startswith("\nFor:")
    assert "\nAgainst:" in answer["text"]
    assert "\nAll in all:" in answer["text"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"text": ["a", "b"]}, "one prompt per request"),
        ({"return_logprob": True}, "return_logprob=True is not valid"),
        ({"sampling_params": {"n": 2}}, "n=2 is not valid: 1 with front end"),
        ({"sampling_params": {"regex": "a"}}, "regex='a' is not valid: not with"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_what_can_not_be_had_is_a_400(
    server: Server, changes: dict[str, Any], complaint: str, streams: bool
) -> None:
    body = body_for("threadweaver", stream=streams)
    params = body["sampling_params"] | changes.get("sampling_params", {})
    body |= {**changes, "sampling_params": params}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert complaint in answer.text


def test_an_unknown_front_end_is_a_400_with_the_known_ones(server: Server) -> None:
    answer = server.post("/generate", body_for("sprint"))
    assert answer.status_code == 400
    known = "broken, endless, skeleton-of-thought, threadweaver, two-views"
    assert f"one of {known}" in answer.text


def test_a_front_end_that_fails_says_so_and_the_server_goes_on(server: Server) -> None:
    answer = server.post("/generate", body_for("broken"))
    assert answer.status_code == 400
    assert "front end broken failed: a stage must be a list of parts" in answer.text
    assert server.generate(body_for("endless"))["text"]


def endless(rid: str) -> dict[str, Any]:
    body = body_for("endless", rid=rid)
    body["sampling_params"] |= {"max_new_tokens": 2000, "ignore_eos": True}
    return body


def test_the_rid_of_the_request_aborts_all_its_parts(server: Server) -> None:
    events: list[dict[str, Any]] = []
    reader = threading.Thread(
        target=lambda: events.extend(stream(server, endless("mine")))
    )
    reader.start()
    wait_for(lambda: server.state()["num_running"] == 2)
    assert server.post("/abort_request", {"rid": "mine"}).status_code == 200
    reader.join(60)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    server.flush()


def test_a_client_that_goes_takes_its_branches_with_it(server: Server) -> None:
    answer = server.post("/generate", {**endless("gone"), "stream": True}, stream=True)
    next(answer.iter_lines())
    wait_for(lambda: server.state()["num_running"] == 2)
    answer.close()
    server.flush()
    assert server.generate(body_for("endless", rid="gone"))["text"]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_start_with_a_wrong_extension_ends_with_code_2(tmp_path: Path) -> None:

    write_distribution(
        tmp_path, {}, {"sglang_taper.policies": ["mine = mine_absent:P"]}
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_taper.launch_server", "--model-path", "smollm2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "entry point mine = mine_absent:P of taper-test-extension" in done.stderr
