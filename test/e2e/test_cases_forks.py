"""Cases of forks, aborts, grammars and seeds on a server with room for everybody."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import sglang as sgl
from forking import (
    alone,
    assert_idle_pool,
    branch_of,
    counters,
    ids_of,
    in_one_call,
    meta_of,
    new_group,
    prefilled,
    reason_of,
    some_ids,
    together,
    uncached,
    wait_for,
)
from requests import Response
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

import sglang_taper
from server import Server
from sglang_taper.engine import requests

VOCABULARY = 49_152


@pytest.fixture(autouse=True)
def _every_token_accounted_for(request: pytest.FixtureRequest) -> Iterator[None]:
    if "taper_server" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("taper_server")
    server.set_policy(policy="eager")
    server.flush()
    yield
    assert_idle_pool(server)


def test_case_01_two_branches_of_an_empty_state_generate(taper_server: Server) -> None:
    states: list[Any] = []

    @sgl.function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: ("Red", "Blue")[i] + sgl.gen("text", max_tokens=4)
        states.extend(forks.states)
        forks.join()

    backend = sglang_taper.RuntimeEndpoint(taper_server.url)
    program.run(temperature=0, backend=backend)
    infos = [state.get_meta_info("text")["taper"] for state in states]
    assert [info["prefix_tokens_shared"] for info in infos] == [0, 0]
    sampling = {"temperature": 0, "max_new_tokens": 4}
    for state, text in zip(states, ("Red", "Blue"), strict=True):
        body = {"text": text, "sampling_params": sampling}
        assert state["text"] == taper_server.generate(body)["text"]


def test_case_02_samples_report_only_reuse_that_happened(taper_server: Server) -> None:
    ids = some_ids("fresh", 60)
    before = counters(taper_server)["num_prefilled_tokens"]
    answers = taper_server.generate(branch_of(new_group(), ids, n=4))
    computed = counters(taper_server)["num_prefilled_tokens"] - before
    # Once for all; the last token of a sample is a decode step of its own at most.
    assert computed == 60 + sum(map(prefilled, answers))
    assert all(uncached(a) - prefilled(a) in (0, 1) for a in answers)
    again = taper_server.generate(branch_of(new_group(), ids, n=4))
    assert counters(taper_server)["num_prefilled_tokens"] - before <= computed + 5
    assert all(prefilled(answer) <= 1 for answer in again)


def seeds_of_samples(seed: int) -> list[int]:
    """What a chat completion with n=4 sends, in SGLang's own steps."""
    message = {"role": "user", "content": "Hello"}
    chat = ChatCompletionRequest(model="m", messages=[message], seed=seed, n=4)
    call = GenerateReqInput(
        input_ids=[1, 2], sampling_params=chat.to_sampling_params([], {})
    )
    requests.prepare(call)
    call.normalize_batch_and_arguments()
    requests.assign_groups_hook(None, call)
    shared = SamplingParams(**call[0].sampling_params)
    seeds = []
    for _ in range(4):
        sample = SimpleNamespace(sampling_params=copy.copy(shared))
        requests.number_sibling_hook(None, sample)
        seeds.append(sample.sampling_params.sampling_seed)
    return seeds


def test_case_06_a_seed_on_the_chat_route_is_used_and_can_be_repeated() -> None:
    """The seed of each sample; sampling by it needs a GPU's deterministic mode."""
    first, again, other = (seeds_of_samples(seed) for seed in (7, 7, 8))
    assert first == again
    assert first[0] == 7
    assert len({*first, *other}) == 8


def test_case_12_the_pool_is_whole_again_after_256_forks(taper_server: Server) -> None:
    before = assert_idle_pool(taper_server)["pool"]
    body = branch_of(new_group(), some_ids("many", 40), n=256, max_new_tokens=2)
    answers = taper_server.generate(body)
    assert {len(ids) for ids in ids_of(answers)} == {2}
    assert [meta_of(answer)["branch"] for answer in answers] == list(range(256))
    assert_idle_pool(taper_server)
    taper_server.flush()
    assert assert_idle_pool(taper_server)["pool"] == before


def test_case_24_a_stop_string_of_many_tokens_fires(taper_server: Server) -> None:
    digits = {"regex": "[0-9]{48}", "max_new_tokens": 60, "ignore_eos": False}
    body = branch_of("", some_ids("digits", 8), **digits)
    body["sampling_params"]["custom_params"] = None
    full = taper_server.generate(body)["text"]
    assert len(full) == 48
    stop = full[20:44]
    body = branch_of(new_group(), body["input_ids"], n=2, stop=[stop], **digits)
    for answer in taper_server.generate(body):
        assert answer["text"] == full[: full.find(stop)]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def post_all(server: Server, bodies: list[dict[str, Any]]) -> list[Response]:
    """Answers that may be errors, in order."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.post("/generate", body), bodies))


def test_case_25_a_branch_that_leaves_its_grammar_ends_alone(
    taper_server: Server,
) -> None:
    """A logit processor forbids every token of the vocabulary but the first, which
    the grammar forbids."""
    bodies = [branch_of("", some_ids("grammar", 20), i, 3) for i in range(3)]
    expected = ids_of(alone(taper_server, [bodies[0], bodies[2]]))
    group = new_group()
    bodies = [branch_of(group, some_ids("grammar", 20), i, 3) for i in range(3)]
    bodies[1]["sampling_params"]["regex"] = "(yes|no)"
    bodies[1]["sampling_params"]["custom_params"]["token_ids"] = [*range(1, VOCABULARY)]
    processor = DisallowedTokensLogitsProcessor.to_str()
    bodies[1]["custom_logit_processor"] = processor
    answers = post_all(taper_server, bodies)
    assert ids_of([answers[0].json(), answers[2].json()]) == expected
    assert "Grammar accept_token failed" in answers[1].text


def test_case_60_a_branch_with_a_bad_grammar_ends_alone(taper_server: Server) -> None:
    group, ids = new_group(), some_ids("bad grammar", 20)
    bodies = [branch_of(group, ids, i, 3) for i in range(3)]
    expected = ids_of(alone(taper_server, [bodies[0], bodies[2]]))
    bodies[1]["sampling_params"]["regex"] = "(yes|no"
    answers = post_all(taper_server, bodies)
    assert ids_of([answers[0].json(), answers[2].json()]) == expected
    assert answers[1].status_code == 400
    assert "regex" in answers[1].text


def test_case_42_an_abort_leaves_the_tokens_of_other_rows_alone(
    taper_server: Server,
) -> None:
    group = new_group()
    rids = [uuid.uuid4().hex for _ in range(3)]
    bodies = [
        branch_of(group, some_ids(i, 30), i, 3, max_new_tokens=40) | {"rid": rid}
        for i, rid in enumerate(rids)
    ]
    expected = ids_of(alone(taper_server, [bodies[0], bodies[2]]))
    bodies[1]["sampling_params"]["max_new_tokens"] = 2000
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(taper_server.generate, body) for body in bodies]
        wait_for(lambda: taper_server.state()["num_running"] == 3)
        assert taper_server.post("/abort_request", {"rid": rids[1]}).ok
        answers = [future.result() for future in running]
    assert reason_of(answers[1]) == "abort"
    assert ids_of([answers[0], answers[2]]) == expected


def test_case_53_an_abort_ends_all_children_however_far_they_are(
    taper_server: Server,
) -> None:
    group, lengths = new_group(), (2, 2000, 2000, 1000)
    bodies = [
        branch_of(group, some_ids("unequal", 30), i, 4, max_new_tokens=length)
        for i, length in enumerate(lengths)
    ]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(taper_server.generate, body) for body in bodies]
        assert reason_of(running[0].result()) == "length"
        assert taper_server.post("/abort_request", {"group": group}).ok
        assert [reason_of(r.result()) for r in running[1:]] == ["abort"] * 3
    assert assert_idle_pool(taper_server)["pinned_tokens"] == 0


def test_case_56_samples_are_counted_as_branches_of_one_request(
    taper_server: Server,
) -> None:
    before = counters(taper_server)["num_branches"]
    taper_server.generate(branch_of(new_group(), some_ids("metrics", 20), n=4))
    state = taper_server.state()
    assert state["counters"]["num_branches"] - before == 4
    assert len(state["groups"]) == 1


def test_case_65_a_join_computes_only_what_is_not_in_the_tree(
    taper_server: Server,
) -> None:
    """The parent and its first child are there; the texts of the others are not."""
    group, prompt = new_group(), some_ids("parent", 100)
    own = [some_ids(i, 3) for i in range(3)]
    bodies = [branch_of(group, prompt + own[i], i, 3, depth=1) for i in range(3)]
    children = taper_server.generate(in_one_call(bodies))
    texts = [own[i] + children[i]["output_ids"] for i in range(3)]
    joined = [*prompt, *texts[0], *texts[1], *texts[2]]
    answer = taper_server.generate(branch_of(group, joined))
    # The last token of the first child was sampled and never run.
    assert prefilled(answer) == len(texts[1]) + len(texts[2]) + 1
    assert meta_of(answer)["tokens_recomputed"] <= 1
    assert [answer["output_ids"]] == ids_of(
        alone(taper_server, [branch_of(group, joined)])
    )


def test_case_67_prompt_logprobs_are_right_and_their_cost_is_told(
    taper_server: Server,
) -> None:
    group, ids = new_group(), some_ids("logprobs", 50)
    asked = {"return_logprob": True, "logprob_start_len": 0}
    cold = taper_server.generate(branch_of(new_group(), ids) | asked)
    taper_server.flush()
    taper_server.generate(branch_of(group, ids, max_new_tokens=1))
    warm = taper_server.generate(branch_of(group, ids) | asked)
    found, expected = (a["meta_info"]["input_token_logprobs"] for a in (warm, cold))
    assert [entry[1] for entry in found] == ids
    assert found[0][0] is None
    values, wanted = ([entry[0] for entry in e[1:]] for e in (found, expected))
    assert values == pytest.approx(wanted, abs=1e-4)
    assert prefilled(warm) == uncached(warm) == len(ids)
    only_outputs = branch_of(group, ids) | {"return_logprob": True}
    assert prefilled(taper_server.generate(only_outputs)) <= 1


def test_branches_over_connections_of_their_own_share_as_in_one_call(
    taper_server: Server,
) -> None:
    ids = some_ids("connections", 300)
    group = new_group()
    answers = together(taper_server, [branch_of(group, ids, i, 6) for i in range(6)])
    assert len({tuple(found) for found in ids_of(answers)}) == 1
    assert sum(map(prefilled, answers)) == len(ids)
