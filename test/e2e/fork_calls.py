"""`POST /fork` for tests: bodies, answers, events, what separate calls would say."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from server import Server

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
# Long enough that something can happen to it while it runs.
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
Event = dict[str, Any]


def call(prompt: Any, branches: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """A greedy body; `prompt` is a text or the field that names it."""
    source = {"text": prompt} if isinstance(prompt, str) else dict(prompt)
    parts = [{"text": b} if isinstance(b, str) else dict(b) for b in branches]
    return {**source, "branches": parts, "sampling_params": GREEDY, **fields}


def fork(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/fork", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def lines(server: Server, body: dict[str, Any]) -> Iterator[str]:
    """What follows `data: `, as it comes; closing it drops the connection."""
    with server.post("/fork", {**body, "stream": True}, stream=True) as answer:
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines(chunk_size=1):
            if line:
                assert line.startswith(b"data: "), line
                yield line[6:].decode()


def events(server: Server, body: dict[str, Any]) -> Iterator[Event]:
    """The events, the summary among them."""
    for line in lines(server, body):
        if line != "[DONE]":
            yield json.loads(line)


def by_branch(received: Sequence[Event]) -> dict[int | None, list[Event]]:
    """The events of each branch in the order they came."""
    found: dict[int | None, list[Event]] = defaultdict(list)
    for event in received:
        if "branch" in event:
            found[event["branch"]].append(event)
    return dict(found)


def finals(received: Sequence[Event]) -> list[Event]:
    """The last event of each branch, in order; checks that it is the only final one."""
    found = by_branch(received)
    for branch_events in found.values():
        *before, last = branch_events
        assert last["finish_reason"] is not None
        assert all(event["finish_reason"] is None for event in before)
    return [found[key][-1] for key in sorted(k for k in found if k is not None)]


def generated(server: Server, prompt: Any, **sampling: Any) -> dict[str, Any]:
    """What a call of /generate of its own answers."""
    key = "text" if isinstance(prompt, str) else "input_ids"
    body = {key: prompt, "sampling_params": {**GREEDY, **sampling}}
    return dict(server.generate(body))


def reasons(branches: Sequence[Event]) -> list[str]:
    return [branch["finish_reason"]["type"] for branch in branches]


def chat_ids(server: Server, messages: list[dict[str, str]]) -> list[int]:
    """The ids that SGLang's chat route makes of these messages."""
    answer = server.post("/v1/tokenize", {"model": "smollm2", "messages": messages})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


def ids_of_text(server: Server, text: str) -> list[int]:
    body = {"model": "smollm2", "prompt": text, "add_special_tokens": False}
    return list(server.post("/v1/tokenize", body).json()["tokens"])
