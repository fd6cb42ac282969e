"""`POST /fork`: what it answers, streamed and not, and that it says what separate calls
would say."""

from __future__ import annotations

import json
import uuid
from itertools import pairwise
from typing import Any

import pytest
from fork_calls import (
    GREEDY,
    by_branch,
    call,
    chat_ids,
    events,
    finals,
    fork,
    generated,
    ids_of_text,
    lines,
    reasons,
)
from forking import some_ids, stream, wait_for
from workload import STORY, TOPICS

from server import Server

CHAT = [{"role": "user", "content": "Name a colour of the sea."}]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["age"],
        "additionalProperties": False,
    }
)


pytestmark = pytest.mark.usefixtures("eager_and_idle")


def test_branches_say_what_separate_calls_say(taper_server: Server) -> None:
    answer = fork(taper_server, call(STORY, TOPICS))
    assert [branch["branch"] for branch in answer["branches"]] == [*range(len(TOPICS))]
    for topic, branch in zip(TOPICS, answer["branches"], strict=True):
        alone = generated(taper_server, STORY + topic)
        assert branch["text"] == alone["text"]
        assert branch["output_ids"] == alone["output_ids"]
        assert branch["finish_reason"] == alone["meta_info"]["finish_reason"]
    assert answer["join"] is None


@pytest.mark.parametrize("streamed", [False, True])
def test_the_shared_prompt_is_prefilled_once(
    taper_server: Server, streamed: bool
) -> None:
    prefix, width = some_ids(("prefix", streamed), 200), 6
    branches = [{"input_ids": some_ids((streamed, i), 4)} for i in range(width)]
    body = call({"input_ids": prefix}, branches)
    if streamed:
        found = finals([*events(taper_server, body)])
    else:
        found = fork(taper_server, body)["branches"]
    metas = [branch["meta_info"]["taper"] for branch in found]
    assert {meta["width"] for meta in metas} == {width}
    # The first computes the prefix, the others their own tokens.
    assert sorted(meta["tokens_prefilled"] for meta in metas) == [4] * (width - 1) + [
        204
    ]


def test_a_stream_has_its_events_in_order_one_end_each_a_summary_and_done(
    taper_server: Server,
) -> None:
    body = call(STORY, TOPICS)
    received = [*lines(taper_server, body)]
    assert received.pop() == "[DONE]"
    *told, summary = [json.loads(line) for line in received]
    assert set(summary) == {"usage", "taper"}
    assert all("branch" in event for event in told)
    for branch_events in by_branch(told).values():
        assert len({event["rid"] for event in branch_events}) == 1
        assert len(branch_events) > 3
        texts = [event["text"] for event in branch_events]
        # As /generate streams by default: the text so far.
        for shorter, longer in pairwise(texts):
            assert longer.startswith(shorter)
    last = finals(told)
    answer = fork(taper_server, body)
    assert [event["text"] for event in last] == [b["text"] for b in answer["branches"]]
    assert reasons(last) == reasons(answer["branches"])
    assert summary["usage"] == answer["usage"]
    assert summary["taper"]["width"] == len(TOPICS)
    groups = {event["meta_info"]["taper"]["group"] for event in last}
    assert groups == {summary["taper"]["group"]}


def test_branches_run_at_the_same_time(taper_server: Server) -> None:
    told = [*events(taper_server, call(STORY, TOPICS))]
    order = [event["branch"] for event in told if "branch" in event]
    first_end = next(i for i, event in enumerate(told) if event["finish_reason"])
    assert {*order[:first_end]} == {*range(len(TOPICS))}


def test_usage_counts_a_shared_token_once_and_every_new_one(
    taper_server: Server,
) -> None:
    prefix = some_ids("usage", 50)
    branches = [{"input_ids": some_ids(i, 3 + i)} for i in range(3)]
    branches.append({"sampling_params": {"max_new_tokens": 5}})
    answer = fork(taper_server, call({"input_ids": prefix}, branches))
    assert answer["usage"]["prompt_tokens"] == 50 + 3 + 4 + 5
    assert answer["usage"]["completion_tokens"] == 3 * 12 + 5
    assert answer["usage"]["total_tokens"] == 62 + 41


def test_each_branch_has_parameters_of_its_own_over_the_common_ones(
    taper_server: Server,
) -> None:
    params: list[dict[str, Any]] = [
        {"regex": "(yes|no)( yes| no){2}", "ignore_eos": False},
        {"json_schema": SCHEMA, "ignore_eos": False, "max_new_tokens": 40},
        {"stop": [" the"], "max_new_tokens": 60},
        {"max_new_tokens": 3},
        {},
    ]
    branches = [{"text": TOPICS[i], "sampling_params": p} for i, p in enumerate(params)]
    answer = fork(taper_server, call(STORY, branches))
    regex, schema, stop, short, common = answer["branches"]
    assert regex["text"].split()[0] in ("yes", "no")
    assert 1 <= json.loads(schema["text"])["age"] <= 9
    assert stop["finish_reason"] == {"type": "stop", "matched": " the"}
    assert short["meta_info"]["completion_tokens"] == 3
    assert common["meta_info"]["completion_tokens"] == GREEDY["max_new_tokens"]
    for branch, own, topic in zip(answer["branches"], params, TOPICS, strict=True):
        assert branch["text"] == generated(taper_server, STORY + topic, **own)["text"]


def test_logprobs_come_with_the_branches_that_ask(taper_server: Server) -> None:
    branches = [
        {"text": " A", "return_logprob": True, "top_logprobs_num": 2},
        {"text": " B"},
    ]
    told = by_branch([*events(taper_server, call(STORY, branches))])
    last = told[0][-1]
    assert len(last["logprobs"]["output_token_logprobs"]) == GREEDY["max_new_tokens"]
    assert all(len(top) == 2 for top in last["logprobs"]["output_top_logprobs"])
    assert all("logprobs" not in event for event in told[1])
    body = {"text": STORY + " A", "sampling_params": GREEDY, "return_logprob": True}
    alone = taper_server.generate(body)["meta_info"]["output_token_logprobs"]
    ours = last["logprobs"]["output_token_logprobs"]
    assert [p[1] for p in ours] == [p[1] for p in alone]
    assert [p[0] for p in ours] == pytest.approx([p[0] for p in alone], abs=1e-3)


def test_branches_without_a_text_are_samples_of_the_prompt(
    taper_server: Server,
) -> None:
    answer = fork(taper_server, call(STORY, [{}, {}]))
    alone = generated(taper_server, STORY)["text"]
    assert [branch["text"] for branch in answer["branches"]] == [alone, alone]
    assert answer["branches"][1]["meta_info"]["taper"]["row_aliased"]


def test_ids_and_texts_may_be_mixed(taper_server: Server) -> None:
    prefix, ids = some_ids("mixed", 20), some_ids("branch", 3)
    answer = fork(
        taper_server,
        call({"input_ids": prefix}, [" and so", {"input_ids": ids}]),
    )
    with_text = [*prefix, *ids_of_text(taper_server, " and so")]
    alone = [generated(taper_server, p) for p in (with_text, [*prefix, *ids])]
    found = [branch["output_ids"] for branch in answer["branches"]]
    assert found == [one["output_ids"] for one in alone]
    text_then_ids = fork(taper_server, call(STORY, [{"input_ids": ids}]))
    whole = [*ids_of_text(taper_server, STORY), *ids]
    expected = generated(taper_server, whole)["output_ids"]
    assert text_then_ids["branches"][0]["output_ids"] == expected


def test_messages_go_through_the_chat_template(taper_server: Server) -> None:
    openers = [" It is", " Some say"]
    answer = fork(taper_server, call({"messages": CHAT}, openers))
    ids = chat_ids(taper_server, CHAT)
    for opener, branch in zip(openers, answer["branches"], strict=True):
        prompt = [*ids, *ids_of_text(taper_server, opener)]
        assert branch["meta_info"]["prompt_tokens"] == len(prompt)
        assert branch["output_ids"] == generated(taper_server, prompt)["output_ids"]


# -- join


@pytest.mark.parametrize("streamed", [False, True])
def test_a_join_goes_on_from_all_branches_in_order(
    taper_server: Server, streamed: bool
) -> None:
    join = {"text": "\nIn short,", "sampling_params": {"max_new_tokens": 9}}
    body = call(STORY, ["\n1.", "\n2."], join=join)
    if streamed:
        told = [*events(taper_server, body)]
        branches, joined = finals(told), by_branch(told)[None]
        assert [event["finish_reason"] for event in joined[:-1]] == [None] * 8
        last = joined[-1]
        # It begins when the branches have ended.
        assert told.index(joined[0]) > max(told.index(b) for b in branches)
    else:
        answer = fork(taper_server, body)
        branches, last = answer["branches"], answer["join"]
    text = STORY + "".join(
        f"\n{i + 1}." + branch["text"] for i, branch in enumerate(branches)
    )
    alone = generated(taper_server, text + "\nIn short,", max_new_tokens=9)
    assert last["branch"] is None
    assert last["text"] == alone["text"]
    # The prompt and the first branch are in the tree: only the last token of that is
    # computed again, with what follows.
    first = len(ids_of_text(taper_server, STORY + "\n1.")) + GREEDY["max_new_tokens"]
    assert last["meta_info"]["cached_tokens"] == first - 1


def test_a_join_of_ids_has_exactly_the_ids_that_were_generated(
    taper_server: Server,
) -> None:
    prefix = some_ids("join", 30)
    ids = [some_ids(i, 2) for i in range(2)]
    branches = [{"input_ids": part} for part in ids]
    body = call({"input_ids": prefix}, branches, join={"input_ids": [4321]})
    answer = fork(taper_server, body)
    prompt = list(prefix)
    for part, branch in zip(ids, answer["branches"], strict=True):
        prompt += [*part, *branch["output_ids"]]
    prompt.append(4321)
    assert answer["join"]["meta_info"]["prompt_tokens"] == len(prompt)
    assert answer["join"]["output_ids"] == generated(taper_server, prompt)["output_ids"]
    # The second branch's own tokens are in the join's prompt in another place.
    assert answer["usage"]["prompt_tokens"] == len(prompt) + 2


def test_a_join_leaves_out_what_was_refused(taper_server: Server) -> None:
    bad = {"text": " B", "sampling_params": {"regex": "("}}
    body = call(STORY, [" A", bad], join={"text": " So"})
    answer = fork(taper_server, body)
    assert reasons(answer["branches"]) == ["length", "abort"]
    text = STORY + " A" + answer["branches"][0]["text"] + " So"
    assert answer["join"]["text"] == generated(taper_server, text)["text"]
    assert answer["taper"]["num_finished"] == 1


# -- the request of another call as the prompt


def test_a_finished_request_of_a_group_is_forked_by_its_id(
    taper_server: Server,
) -> None:
    rid, group = uuid.uuid4().hex, uuid.uuid4().hex
    sampling = {**GREEDY, "custom_params": {"taper": {"group": group}}}
    parent = taper_server.generate(
        {"text": STORY, "rid": rid, "sampling_params": sampling}
    )
    assert taper_server.state()["num_pins"] == 1
    answer = fork(taper_server, call({"rid": rid}, [" Then", " But"]))
    assert answer["taper"]["group"] == group
    before = [*ids_of_text(taper_server, STORY), *parent["output_ids"]]
    for text, branch in zip([" Then", " But"], answer["branches"], strict=True):
        prompt = [*before, *ids_of_text(taper_server, text)]
        assert branch["output_ids"] == generated(taper_server, prompt)["output_ids"]
        found = branch["meta_info"]["taper"]
        assert found["prefix_tokens_pinned"] >= len(before) - 1
        assert found["tokens_prefilled"] <= 2
    # Every branch of the only fork has ended, and its pin with it.
    assert taper_server.state()["num_pins"] == 0


def test_a_stop_string_that_was_cut_is_not_continued(taper_server: Server) -> None:
    plain = generated(taper_server, STORY)
    # The last word of what it says, and what comes before.
    before, space, word = plain["text"].rpartition(" ")
    rid, meta = uuid.uuid4().hex, {"group": uuid.uuid4().hex}
    sampling = {**GREEDY, "stop": [space + word], "custom_params": {"taper": meta}}
    body = {"text": STORY, "rid": rid, "sampling_params": sampling}
    assert taper_server.generate(body)["text"] == before
    (branch,) = fork(taper_server, call({"rid": rid}, [" Next"]))["branches"]
    alone = generated(taper_server, STORY + before + " Next")
    assert branch["output_ids"] == alone["output_ids"]


def test_a_running_request_is_forked_by_its_id(taper_server: Server) -> None:
    rid, group = uuid.uuid4().hex, uuid.uuid4().hex
    sampling = {**GREEDY, "max_new_tokens": 1500}
    sampling["custom_params"] = {"taper": {"group": group}}
    body = {"text": STORY, "rid": rid, "sampling_params": sampling}
    parent = stream(taper_server, body)
    for _ in range(20):
        next(parent)
    answer = fork(taper_server, call({"rid": rid}, [{}, " But"]))
    # The parent goes on meanwhile.
    assert taper_server.state()["num_live_groups"] == 1
    assert next(parent)["meta_info"]["finish_reason"] is None
    parent.close()
    assert answer["taper"]["group"] == group
    first, _ = answer["branches"]
    num_read = len(ids_of_text(taper_server, STORY))
    assert first["meta_info"]["prompt_tokens"] >= num_read + 20
    assert all(
        b["meta_info"]["taper"]["tokens_recomputed"] <= 1 for b in answer["branches"]
    )
    wait_for(lambda: taper_server.state()["num_live_groups"] == 0)


def test_a_request_of_another_credential_is_not_known(taper_server: Server) -> None:
    def forked(rid: str, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = call({"rid": rid}, [" Then"])
        return taper_server.post("/fork", body, headers=headers).status_code

    for owner, others in (("mine", ("yours", "")), ("", ("yours",))):
        headers = {"Authorization": f"Bearer {owner}"} if owner else {}
        answer = taper_server.post("/fork", call(STORY, [" A"]), headers=headers)
        rid = answer.json()["branches"][0]["rid"]
        assert {forked(rid, other) for other in others} == {400}
        assert forked(rid, owner) == 200


def test_a_branch_of_a_fork_is_forked_again(taper_server: Server) -> None:
    first = fork(taper_server, call(STORY, [" A", " B"]))
    rid = first["branches"][1]["rid"]
    again = fork(taper_server, call({"rid": rid}, [" x", " y"]))
    assert again["taper"]["group"] == first["taper"]["group"]
    text = STORY + " B"
    prompt = [
        *ids_of_text(taper_server, text),
        *first["branches"][1]["output_ids"],
        *ids_of_text(taper_server, " x"),
    ]
    expected = generated(taper_server, prompt)["output_ids"]
    assert again["branches"][0]["output_ids"] == expected


# -- SLOs, names, the schema


def test_slos_of_the_body_and_of_headers_reach_the_scheduler(
    taper_server: Server,
) -> None:
    group = uuid.uuid4().hex
    body = call(STORY, [" A", " B"], group=group, tpot_slo_ms=77.5)
    headers = {"x-slo-ttft-ms": "1234"}
    answer = taper_server.post("/fork", body, headers=headers)
    assert answer.headers["x-taper-group"] == group
    (found,) = [g for g in taper_server.state()["groups"] if g["group"] == group]
    assert (found["tpot_slo_ms"], found["ttft_slo_ms"]) == (77.5, 1234)


def test_groups_that_the_server_names_cannot_be_guessed(taper_server: Server) -> None:
    answers = [fork(taper_server, call(STORY, [{}])) for _ in range(2)]
    names = {answer["taper"]["group"] for answer in answers}
    assert len(names) == 2
    assert all(len(name) == 32 for name in names)


def test_the_route_is_in_the_openapi_schema(taper_server: Server) -> None:
    schema = taper_server.get("/openapi.json").json()
    post = schema["paths"]["/fork"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    models = schema["components"]["schemas"]
    request = models[body["$ref"].rpartition("/")[2]]
    assert {
        "text",
        "input_ids",
        "messages",
        "rid",
        "branches",
        "join",
        "first_k",
    } <= set(request["properties"])
    assert request["properties"]["branches"]["maxItems"] == 4096
    answer = post["responses"]["200"]["content"]
    data = answer["text/event-stream"]["itemSchema"]["properties"]["data"]
    streamed = data["anyOf"][1]["contentSchema"]["oneOf"]
    assert answer["application/json"]["schema"]["$ref"].endswith("/ForkAnswer")
    refs = [s["$ref"] for s in (streamed[0], *streamed[1]["properties"].values())]
    assert {ref.rpartition("/")[2] for ref in refs} <= set(models)
    assert "400" in post["responses"]
    assert models["ForkEvent"]["properties"].keys() >= {"branch", "finish_reason"}
