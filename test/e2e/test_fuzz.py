"""Anything at all, sent to a real server: refused with a sentence, or done.

What a server accepts is compared with what our own checks say about the same bytes.
Bodies are written by Python's `json`, which also writes NaN, infinities, half a
surrogate pair and integers of any size; SGLang reads them with `orjson`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import requests as http
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_taper
from server import Server
from sglang_taper.changes import updated_params
from sglang_taper.engine.headers import slos_from_headers
from sglang_taper.errors import FieldError
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta, parse_branch_meta

NUM_EXAMPLES = 60
JSON = {"Content-Type": "application/json"}

# -- values

numbers = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, 2**63, 2**64, -(2**63) - 1, 1e308]),
)
texts = st.text(max_size=20) | st.text(
    "A-Za-z0-9_.:-/ \0\ud800\udfff\u2028é", max_size=9
)
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=6,
)
good_values = {
    "group": st.from_regex(r"\A[A-Za-z0-9_.:-]{1,12}\Z"),
    "parent": st.from_regex(r"\A[a-z]{1,5}\Z"),
    "branch": st.integers(0, 9),
    "width": st.integers(1, 9),
}


def of_keys(names: Any, likely: dict[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """Objects with some of these keys, at times another one, or no object at all."""
    known = {
        name: (likely or {}).get(name, numbers) | values | numbers for name in names
    }
    objects = st.fixed_dictionaries({}, optional=known)
    others = st.dictionaries(texts, leaves, max_size=1)
    return st.builds(lambda a, b: a | b, objects, others) | objects | values


# -- the server's answer against our own


@pytest.fixture(scope="module", autouse=True)
def _still_alive(taper_server: Server) -> Iterator[None]:
    """After all of it: no traceback of ours, no stuck request, the same policy."""
    taper_server.set_policy(policy="taper")
    before = len(taper_server.text_of_log())
    yield
    assert taper_server.process.poll() is None
    taper_server.flush()
    log = taper_server.text_of_log()[before:]
    # Not of just any path with that name: the environment's own may have it.
    ours = str(Path(sglang_taper.__file__).parent)
    assert ours not in log, log[log.find(ours) - 2000 :][:3000]


def post(server: Server, path: str, body: Any, headers: Any = None) -> http.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http.post(
        server.url + path, data=data, headers={**JSON, **(headers or {})}, timeout=60
    )


def as_read(body: Any) -> Any:
    """What the server gets to see; ValueError where it is no JSON to it."""
    return orjson.loads(json.dumps(body))


def assert_refused(answer: http.Response) -> None:
    assert answer.status_code == 400, (answer.status_code, answer.text[:500])
    assert len(answer.content) < 2000
    assert "message" in answer.text


def generate_body(meta: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"taper": meta}}
    return {"input_ids": [1000, 1001], "sampling_params": sampling}


@settings(max_examples=NUM_EXAMPLES)
@given(meta=of_keys(BranchMeta.__struct_fields__, good_values))
def test_metadata_is_accepted_exactly_when_our_checks_accept_it(
    taper_server: Server, meta: Any
) -> None:
    answer = post(taper_server, "/generate", generate_body(meta))
    try:
        read = as_read(generate_body(meta))["sampling_params"]["custom_params"]["taper"]
        expected = BranchMeta() if read is None else parse_branch_meta(read)
    except ValueError:
        return assert_refused(answer)
    assert answer.status_code == 200, answer.text[:500]
    taper = answer.json()["meta_info"].get("taper")
    assert (taper or {}).get("group") == expected.group
    return None


# Printable, as a client's library lets it through.
header_values = st.floats().map(str) | st.text(
    st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12
)


@settings(max_examples=NUM_EXAMPLES)
@given(ttft=header_values, tpot=header_values)
def test_slo_headers_are_accepted_exactly_when_our_checks_accept_them(
    taper_server: Server, ttft: str, tpot: str
) -> None:
    headers = {"x-slo-ttft-ms": ttft, "x-slo-tpot-ms": tpot}
    answer = post(taper_server, "/generate", generate_body(None), headers)
    try:
        slos_from_headers(headers)
    except FieldError:
        return assert_refused(answer)
    assert answer.status_code == 200, answer.text[:500]
    return None


POLICY_KEYS = (
    *("policy", "cap", "rho", "deadline", "utility", "ttft_slo_ms", "tpot_slo_ms"),
    *("prefill_hold_s", "test_step_cost_ms"),
)
words = st.sampled_from(["taper", "eager", "off", "ledger", "none", "auto", "linear"])


@settings(max_examples=NUM_EXAMPLES)
@given(changes=of_keys(POLICY_KEYS, dict.fromkeys(POLICY_KEYS, words)))
def test_a_policy_change_is_accepted_exactly_when_our_checks_accept_it(
    taper_server: Server, changes: Any
) -> None:
    before = taper_server.state()["params"]
    answer = post(taper_server, "/taper/policy", changes)
    try:
        read = as_read(changes)
        if not isinstance(read, dict):
            raise FieldError("body", read, "a JSON object")
        expected = updated_params(PolicyParams(**before), read)
    except ValueError:
        assert_refused(answer)
        assert taper_server.state()["params"] == before
        return
    assert answer.status_code == 200, answer.text[:500]
    assert answer.json()["params"]["policy"] == expected.policy
    # As it came: a step that costs a second would make the other tests long.
    # `rho` None is the default of the deadline.
    taper_server.set_policy(**{**before, "rho": None})


abort_bodies = of_keys(("group", "parent", "rid", "abort_all", "priority"), good_values)


@settings(max_examples=NUM_EXAMPLES)
@given(body=abort_bodies)
def test_an_abort_of_a_group_is_accepted_exactly_when_our_checks_accept_it(
    taper_server: Server, body: Any
) -> None:
    answer = post(taper_server, "/abort_request", body)
    try:
        read = as_read(body)
        ours = {k: read.get(k) for k in ("group", "parent")} if read else {}
    except (ValueError, AttributeError):
        ours = {}
    if all(value is None for value in ours.values()):
        # SGLang's own: it has its way of saying no.
        assert answer.status_code in (200, 400, 422), answer.text[:500]
        return None
    try:
        parse_branch_meta(ours)
        if read.get("rid") or read.get("abort_all"):
            raise FieldError("body.group", ours, "without rid and abort_all")
    except FieldError:
        return assert_refused(answer)
    assert answer.status_code == 200, answer.text[:500]
    return None


# -- large and deep, where a value is expected

# orjson reads lists in lists up to 1024, Python's repr not even 1000.
LARGE = {
    "1000 lists": "[" * 1000 + "]" * 1000,
    "900 objects": '{"a":' * 900 + "1" + "}" * 900,
    "10 MB of text": '"' + "x" * 10_000_000 + '"',
    "10 MB of numbers": "[" + "7," * 5_000_000 + "7]",
}
PLACES = {
    "metadata": ("/generate", '{"taper": %s}'),
    "group": ("/generate", '{"taper": {"group": %s}}'),
    "slo": ("/generate", '{"taper": {"group": "g", "tpot_slo_ms": %s}}'),
    "policy": ("/taper/policy", '{"policy": %s}'),
    "cap": ("/taper/policy", '{"cap": %s}'),
    "changes": ("/taper/policy", "%s"),
    "aborted group": ("/abort_request", '{"group": %s}'),
    "aborted parent": ("/abort_request", '{"group": "g", "parent": %s}'),
}


@pytest.mark.parametrize("what", LARGE)
def test_what_is_too_large_is_refused_in_a_few_words(
    taper_server: Server, what: str
) -> None:
    for place, (path, template) in PLACES.items():
        body = template.replace("%s", LARGE[what])
        if path == "/generate":
            sampling = f'{{"max_new_tokens": 1, "custom_params": {body}}}'
            body = f'{{"input_ids": [1000], "sampling_params": {sampling}}}'
        answer = post(taper_server, path, body.encode())
        assert answer.status_code == 400, (place, answer.text[:500])
        assert len(answer.content) < 1000, place


def test_a_key_of_a_megabyte_is_refused_in_a_few_words(taper_server: Server) -> None:
    key = {"k" * 1_000_000: 1}
    for path, body in (
        ("/taper/policy", key),
        ("/generate", generate_body({"group": "g", **key})),
    ):
        assert_refused(post(taper_server, path, body))


# -- no JSON, or too much of it

BROKEN = {
    "nothing": b"",
    "half an object": b'{"text": "a"',
    "a key without quotes": b"{text: 1}",
    "nan": b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    "infinity": b'{"cap": Infinity, "group": -Infinity}',
    "a number beyond doubles": b'{"cap": 1e999, "text": 1e999}',
    "a number of 5000 digits": b'{"cap": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"text": "\\ud800", "group": "\\udfff"}',
    "no utf-8": b'{"text": "\xff\xfe", "group": "\xc3"}',
    "utf-16": '{"text": "a"}'.encode("utf-16"),
    "a zero byte": b'{"text": "a"}\0',
    "two objects": b"{}{}",
    "100,000 lists": b"[" * 100_000 + b"]" * 100_000,
    "100,000 objects": b'{"a":' * 100_000,
    "10 MB of one bracket": b"[" * 10_000_000,
    "10 MB of blanks": b" " * 10_000_000,
}
JSON_ROUTES = (
    *("/generate", "/taper/policy", "/abort_request"),
    *("/v1/completions", "/v1/chat/completions"),
)


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_json_is_refused_on_every_route(
    taper_server: Server, what: str
) -> None:
    for path in JSON_ROUTES:
        answer = post(taper_server, path, BROKEN[what])
        assert answer.status_code in (400, 422), (path, answer.text[:500])
        assert len(answer.content) < 3000, path


def test_ten_megabytes_of_prompt_are_refused_and_others_go_on(
    taper_server: Server,
) -> None:
    huge = {**generate_body({"group": "huge"}), "text": "word " * 2_000_000}
    del huge["input_ids"]
    assert post(taper_server, "/generate", huge).status_code == 400
    ids = {**generate_body({"group": "huge"}), "input_ids": [1000] * 1_500_000}
    assert post(taper_server, "/generate", ids).status_code == 400
    many = generate_body({"group": "huge"})
    many["sampling_params"]["stop"] = ["never " * 3] * 300_000
    assert post(taper_server, "/generate", many).status_code in (200, 400)
    assert taper_server.generate(generate_body({"group": "small"}))
