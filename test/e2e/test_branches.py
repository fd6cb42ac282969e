"""Metadata end to end: n>1 on every route, answers, sharing, live state."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from workload import STORY, branch_request, run_all

from server import Server

META_KEYS = {
    "group",
    "branch",
    "width",
    "policy",
    "steps_run",
    "steps_deferred",
    "prefix_tokens_shared",
    "tokens_recomputed",
    "tokens_prefilled",
    "tokens_copied",
    "prefix_tokens_pinned",
    "prefix_tokens_evicted",
    "row_aliased",
    "prefill_held_ms",
    "cancelled_by",
    "deadline_misses",
    "tpot_ms",
}


@pytest.fixture(autouse=True)
def _policy_off(taper_server: Server) -> None:
    taper_server.set_policy(policy="off")
    taper_server.flush()


def samples(**extra: Any) -> dict[str, Any]:
    sampling = {"n": 3, "temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return {"text": STORY, "sampling_params": {**sampling, **extra}}


def test_samples_of_one_prompt_are_branches_of_one_group(taper_server: Server) -> None:
    answers = taper_server.generate(samples())
    metas = [answer["meta_info"]["taper"] for answer in answers]
    assert [meta["branch"] for meta in metas] == [0, 1, 2]
    assert {meta["width"] for meta in metas} == {3}
    assert len({meta["group"] for meta in metas}) == 1
    assert all(set(meta) == META_KEYS for meta in metas)
    assert all(meta["steps_deferred"] > 0 for meta in metas)
    # The prompt was prefilled once; each sample started from its KV as a decode row.
    assert all(meta["prefix_tokens_shared"] > 20 for meta in metas)
    assert all(meta["tokens_prefilled"] == 0 for meta in metas)
    assert all(meta["row_aliased"] for meta in metas)
    assert len({answer["text"] for answer in answers}) == 1


def test_each_prompt_of_a_batch_is_a_group_of_its_own(taper_server: Server) -> None:
    body = samples() | {"text": ["One.", "Two."]}
    metas = [a["meta_info"]["taper"] for a in taper_server.generate(body)]
    assert [meta["branch"] for meta in metas] == [0, 1, 2, 0, 1, 2]
    groups = [meta["group"] for meta in metas]
    assert len(set(groups[:3])) == len(set(groups[3:])) == 1
    assert groups[0] != groups[3]


def test_a_stream_of_samples_ends_each_index_once_with_its_branch(
    taper_server: Server,
) -> None:
    answer = taper_server.post("/generate", samples() | {"stream": True}, stream=True)
    lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
    events = [json.loads(line) for line in lines]
    last = [e for e in events if e["meta_info"]["finish_reason"] is not None]
    assert Counter(e["index"] for e in last) == {0: 1, 1: 1, 2: 1}
    for event in last:
        assert event["meta_info"]["taper"]["branch"] == event["index"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_samples_on_the_openai_routes_are_branches(
    taper_server: Server, path: str
) -> None:
    before = taper_server.state()["counters"]
    body: dict[str, Any] = {"model": "smollm2", "n": 4, "max_tokens": 6}
    body |= {"temperature": 0, "ignore_eos": True}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": STORY}]
    else:
        body["prompt"] = STORY
    answer = taper_server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert [c["index"] for c in answer.json()["choices"]] == [0, 1, 2, 3]
    assert answer.json()["usage"]["completion_tokens"] == 24
    after = taper_server.state()["counters"]
    assert after["num_rows_deferred"] > before["num_rows_deferred"]


def test_slo_headers_reach_the_scheduler(taper_server: Server) -> None:
    body = branch_request(STORY, "with-headers", 0, 1)
    headers = {"x-slo-tpot-ms": "77.5", "x-slo-ttft-ms": "1234"}
    assert taper_server.post("/generate", body, headers=headers).status_code == 200
    (group,) = [
        g for g in taper_server.state()["groups"] if g["group"] == "with-headers"
    ]
    assert (group["tpot_slo_ms"], group["ttft_slo_ms"]) == (77.5, 1234)


def test_plain_requests_carry_nothing_of_ours(taper_server: Server) -> None:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
    assert "taper" not in taper_server.generate(body)["meta_info"]


def test_state_tells_what_happened(taper_server: Server) -> None:
    run_all(taper_server, [branch_request(STORY, "told", i, 4) for i in range(4)])
    state = taper_server.state()
    assert state["params"]["policy"] == "off"
    assert state["latency_model"]["trusted"]
    assert state["latency_model"]["b_ms_per_row"] >= 0
    steps = [s for s in state["recent_steps"] if s["policy"] == "off"]
    deferring = [s for s in steps if s["num_admitted"] < s["num_rows"]]
    assert deferring
    assert all(s["num_admitted"] == s["num_requests"] for s in deferring)
    assert any(s["measured_ms"] and s["predicted_ms"] for s in deferring)


def test_our_metrics_are_in_sglangs_endpoint(taper_server: Server) -> None:
    run_all(taper_server, [branch_request(STORY, "metrics", i, 3) for i in range(3)])
    text = taper_server.get("/metrics").text
    (line,) = [
        row
        for row in text.splitlines()
        if row.startswith("sglang_taper:num_rows_deferred_total")
    ]
    assert float(line.split()[-1]) > 0
    assert "sglang_taper:latency_model_trusted" in text


def test_a_custom_logit_processor_meets_its_own_rows_only(taper_server: Server) -> None:
    bodies = [branch_request(STORY, "processor", i, 4) for i in range(4)]
    plain = run_all(taper_server, bodies[:1])[0]["output_ids"]
    for branch in (1, 3):
        body = bodies[branch]
        body["custom_logit_processor"] = DisallowedTokensLogitsProcessor.to_str()
        body["sampling_params"]["custom_params"]["token_ids"] = plain[:2]
    alone = run_all(taper_server, bodies[1:2])[0]["output_ids"]
    assert not set(plain[:2]) & set(alone)
    answers = run_all(taper_server, bodies)
    assert [a["output_ids"] for a in answers] == [plain, alone, plain, alone]
    assert all(a["meta_info"]["taper"]["steps_deferred"] > 0 for a in answers)


def test_a_beam_search_runs_beside_branches_with_penalties(
    taper_server: Server,
) -> None:
    """Beam search appends rows of its own to the batch: every row runs meanwhile."""
    bodies = [
        branch_request(STORY, "beside", i, 3, frequency_penalty=0.5) for i in range(3)
    ]
    sampling = {"beam_width": 2, "max_new_tokens": 8, "temperature": 0}
    beam = {"text": "Two plus two is", "sampling_params": sampling}
    answers = run_all(taper_server, [*bodies, beam])
    assert all(a["meta_info"]["completion_tokens"] == 20 for a in answers[:3])
    assert answers[3]["text"]
    assert taper_server.state()["counters"]["reasons"]["forced"] > 0


def test_more_branches_than_slots_complete_in_waves(taper_server: Server) -> None:
    """48 branches of one request beside 24 other groups; the server runs 32 rows."""
    wide = [branch_request(STORY, "wide", i, 48, max_new_tokens=3) for i in range(48)]
    others = [
        branch_request(STORY, f"other-{i}", 0, 1, max_new_tokens=3) for i in range(24)
    ]
    answers = run_all(taper_server, [*wide, *others])
    assert len({answer["text"] for answer in answers}) == 1
    metas = [answer["meta_info"]["taper"] for answer in answers]
    assert [meta["branch"] for meta in metas[:48]] == list(range(48))


def test_sampled_branches_differ_and_greedy_ones_equal_separate_calls(
    taper_server: Server,
) -> None:
    sampled = taper_server.generate(samples(n=4, temperature=1.5, max_new_tokens=12))
    assert len({answer["text"] for answer in sampled}) > 1
    greedy = taper_server.generate(samples())
    alone = samples()
    alone["sampling_params"].pop("n")
    assert {a["text"] for a in greedy} == {taper_server.generate(alone)["text"]}
