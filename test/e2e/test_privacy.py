"""Who may ask what, whose group is whose, and where no prompt is to be found."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests as http
from forking import branch_of, new_group, reason_of, some_ids, wait_for

from server import EXACT, Server, running_server

USER, ADMIN = f"user-{uuid.uuid4().hex}", f"admin-{uuid.uuid4().hex}"
# No log line, metric or model says this of itself.
SECRET = "Xylophagous Zwieback"
LONG = {"max_new_tokens": 300}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[Server]:
    """SGLang's two keys are set; requests are not logged, which is the default."""
    flags = ("--api-key", USER, "--admin-api-key", ADMIN, "--enable-metrics")
    with running_server(*EXACT, *flags, calibrates=True) as server:
        yield server


def call(server: Server, method: str, path: str, key: str, body: Any = None) -> Any:
    headers = bearer(key) if key else {}
    url = server.url + path.replace("{id}", "x")
    return http.request(method, url, json=body, headers=headers, timeout=300)


def routes_of_ours(server: Server) -> list[tuple[str, str]]:
    """As the server describes itself, and the one of SGLang's that we extend."""
    paths = call(server, "GET", "/openapi.json", USER).json()["paths"]
    ours = {path for path in paths if path.startswith(("/taper", "/fork"))}
    assert {"/taper/state", "/taper/policy", "/taper/live"} <= ours
    # Without data: it asks for a key and fetches with it.
    ours.remove("/taper/")
    named = [(method.upper(), path) for path in ours for method in paths[path]]
    return [*named, ("POST", "/abort_request")]


def test_no_route_of_ours_answers_without_the_right_key(keyed_server: Server) -> None:
    for method, path in routes_of_ours(keyed_server):
        keys = ["", "wrong", f"{USER}x", USER[:-1]]
        if path.startswith(("/taper", "/abort")):
            # An operator's: the key of a user is not enough.
            keys.append(USER)
        for key in keys:
            answer = call(keyed_server, method, path, key, {"group": "g"})
            assert answer.status_code == 401, (method, path, key)
            assert "version" not in answer.text


def test_the_state_and_the_policy_are_the_operators(keyed_server: Server) -> None:
    state = call(keyed_server, "GET", "/taper/state", ADMIN)
    assert state.json()["params"]["policy"] == "taper"
    changed = call(keyed_server, "POST", "/taper/policy", ADMIN, {"policy": "cap"})
    assert changed.json()["params"]["policy"] == "cap"


def test_a_calibration_empties_the_cache_also_where_that_needs_the_admin_key(
    keyed_server: Server,
) -> None:
    assert "Calibrated the step-latency model" in keyed_server.text_of_log()
    assert 'POST /flush_cache HTTP/1.1" 401' not in keyed_server.text_of_log()


def test_the_operator_aborts_the_group_of_a_user(keyed_server: Server) -> None:
    group = new_group()
    body = branch_of(group, some_ids("user's", 20), n=3, **LONG)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call, keyed_server, "POST", "/generate", USER, body)
        wait_for(lambda: group in live_groups(keyed_server, ADMIN))
        abort = {"group": group}
        assert call(keyed_server, "POST", "/abort_request", ADMIN, abort).ok
        answers = running.result().json()
    assert {reason_of(answer) for answer in answers} == {"abort"}


def live_groups(server: Server, key: str = "") -> list[str]:
    state = call(server, "GET", "/taper/state", key).json()
    return [g["group"] for g in state["groups"] if g["num_live_branches"]]


def secret_requests(group: str) -> Iterator[tuple[str, Any]]:
    """Good ones and bad ones of many kinds, all with the secret in their prompt."""
    meta = {"custom_params": {"taper": {"group": group}}}
    sampling: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0, **meta}
    text = f"Tell nobody about {SECRET}. {SECRET}!"
    yield "/generate", {"text": text, "sampling_params": sampling}
    yield "/generate", {"text": text, "sampling_params": {**sampling, "n": 3}}
    yield "/generate", {"text": [text, text], "sampling_params": sampling}
    yield "/generate", {"text": text, "stream": True, "sampling_params": sampling}
    yield "/generate", {"text": text, "sampling_params": {**sampling, "n": -1}}
    yield "/generate", {"text": text, "no_such_field": 1}
    yield "/generate", {"text": text, "sampling_params": {"stop": SECRET}}
    yield "/generate", {"text": 2000 * text, "sampling_params": sampling}
    bad = {"custom_params": {"taper": {"group": "a b"}}}
    yield "/generate", {"text": text, "sampling_params": bad}
    branches = [{"text": f" {SECRET}:"}, {}]
    short = {"max_new_tokens": 6}
    yield "/fork", {"text": text, "branches": branches, "sampling_params": short}
    yield "/fork", {"text": text, "branches": [{"text": SECRET, "no_such_key": 1}]}
    yield "/fork", {"messages": [{"role": "user", "content": [text]}], "branches": [{}]}
    yield "/fork", {"text": text, "rid": SECRET, "branches": [{}]}
    openai: dict[str, Any] = {"model": "smollm2", "max_tokens": 6, **meta}
    messages = [{"role": "user", "content": text}]
    yield "/v1/completions", {"prompt": text, "n": 2, **openai}
    yield "/v1/chat/completions", {"messages": messages, "n": 2, **openai}
    yield "/v1/chat/completions", {"messages": messages, **openai, **bad}


def test_no_prompt_is_in_the_log_the_metrics_or_the_state(keyed_server: Server) -> None:
    group = new_group()
    codes = {
        call(keyed_server, "POST", path, USER, body).status_code
        for path, body in secret_requests(group)
    }
    assert codes == {200, 400}
    half = f'{{"text": "{SECRET}", "sampling_params"'
    url = keyed_server.url + "/generate"
    broken = http.post(url, data=half, headers=bearer(USER), timeout=30)
    assert broken.status_code == 400
    state = call(keyed_server, "GET", "/taper/state", ADMIN).text
    assert group in state
    state += call(keyed_server, "GET", "/taper/live", ADMIN).text
    timeline = call(keyed_server, "GET", f"/taper/requests/{group}", ADMIN)
    assert timeline.ok
    state += timeline.text
    metrics = call(keyed_server, "GET", "/metrics", "").text
    assert "sglang_taper" in metrics
    # SGLang prints its own keys once, at start, with all its other arguments.
    lines = keyed_server.text_of_log().splitlines()
    log = "\n".join(line for line in lines if "server_args={" not in line)
    assert len(log) > 1000
    for where in (state, metrics, log):
        for word in (*SECRET.split(), USER, ADMIN):
            at = where.find(word)
            assert at < 0, where[max(0, at - 200) : at + 200]


def test_two_callers_with_the_same_group_id_have_a_group_each(
    taper_server: Server,
) -> None:
    """A gateway passes on the keys of its users; one has found out another's id."""
    group = new_group()
    with ThreadPoolExecutor(2) as pool:
        running = {
            key: pool.submit(
                call, taper_server, "POST", "/generate", key, long_branch(group, key)
            )
            for key in ("hers", "his")
        }
        wait_for(lambda: live_groups(taper_server) == [group, group])
        assert call(taper_server, "POST", "/abort_request", "his", {"group": group}).ok
        his, hers = (running[key].result().json() for key in ("his", "hers"))
    assert (reason_of(his), reason_of(hers)) == ("abort", "length")
    assert hers["meta_info"]["taper"]["group"] == group
    text = json.dumps([his, hers, taper_server.state()])
    assert "/" + group not in text


def long_branch(group: str, seed: object) -> dict[str, Any]:
    return branch_of(group, some_ids(seed, 20), **LONG)


def test_nobody_else_can_end_what_a_guessed_branch_has_pinned(
    taper_server: Server,
) -> None:
    """A stranger's branches complete a fork of theirs, not hers."""
    group, ids = new_group(), some_ids("pinned", 200)
    taper_server.flush()
    assert taper_server.state()["pinned_tokens"] == 0
    parent = branch_of(group, ids, max_new_tokens=1)
    assert call(taper_server, "POST", "/generate", "hers", parent).ok
    pinned = taper_server.state()["pinned_tokens"]
    assert pinned >= len(ids)
    for branch in range(2):
        guess = branch_of(group, some_ids("guess", 9), branch, 2, depth=1)
        assert call(taper_server, "POST", "/generate", "his", guess).ok
    call(taper_server, "POST", "/abort_request", "his", {"group": group})
    assert taper_server.state()["pinned_tokens"] == pinned
    # Who shows no key to a server without keys is its operator.
    call(taper_server, "POST", "/abort_request", "", {"group": group})
    assert taper_server.state()["pinned_tokens"] == 0
