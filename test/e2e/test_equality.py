"""Deferring changes when a token comes, never what it is (design invariant 4)."""

from __future__ import annotations

from typing import Any

import pytest
from workload import logprobs, mixed_requests, outputs, run_all

from server import EXACT, Server, running_server

DEFERRING = (
    {"policy": "off"},
    {"policy": "cap", "cap": 2},
    {"policy": "taper", "deadline": "schedule", "rho": 0.3},
    {"policy": "taper", "deadline": "progress", "rho": 0.0, "utility": "concave"},
)


def name_of(changes: dict[str, Any]) -> str:
    return "-".join(str(value) for value in changes.values())


def run_under(server: Server, changes: dict[str, Any], requests: Any) -> Any:
    """Answers under a policy, and how many rows it deferred."""
    if changes["policy"] == "taper":
        changes = {**changes, "tpot_slo_ms": slo_between(server)}
    server.set_policy(**changes)
    before = server.state()["counters"]["num_rows_deferred"]
    answers = run_all(server, requests)
    deferred = server.state()["counters"]["num_rows_deferred"] - before
    server.flush()
    return answers, deferred


def slo_between(server: Server) -> float:
    """A TPOT that the baseline of the mix keeps and all of its rows would not."""
    model = server.state()["latency_model"]
    return float(1.3 * (model["a_ms"] + 4 * model["b_ms_per_row"]))


@pytest.fixture(scope="module")
def stock_answers(stock_server: Server) -> Any:
    requests = mixed_requests(with_penalty=False)
    answers = run_all(stock_server, requests)
    stock_server.flush()
    return answers


@pytest.fixture(scope="module")
def eager_answers(taper_server: Server) -> Any:
    answers, deferred = run_under(taper_server, {"policy": "eager"}, mixed_requests())
    assert deferred == 0
    return answers


@pytest.mark.parametrize("changes", DEFERRING, ids=name_of)
def test_greedy_outputs_equal_those_of_stock_sglang(
    taper_server: Server, stock_answers: Any, changes: dict[str, Any]
) -> None:
    requests = mixed_requests(with_penalty=False)
    answers, deferred = run_under(taper_server, changes, requests)
    assert deferred > 0
    assert outputs(answers) == outputs(stock_answers)
    assert logprobs(answers[2]) == pytest.approx(logprobs(stock_answers[2]), abs=1e-4)


@pytest.mark.parametrize("changes", DEFERRING, ids=name_of)
def test_penalties_see_the_same_tokens_as_without_deferring(
    taper_server: Server, eager_answers: Any, changes: dict[str, Any]
) -> None:
    answers, deferred = run_under(taper_server, changes, mixed_requests())
    assert deferred > 0
    assert outputs(answers) == outputs(eager_answers)


def test_a_penalty_changes_the_text_at_all(
    eager_answers: Any, stock_answers: Any
) -> None:
    assert eager_answers[8]["text"] != stock_answers[8]["text"]


def test_branches_end_by_their_own_rules(eager_answers: Any) -> None:
    reasons = [answer["meta_info"]["finish_reason"] for answer in eager_answers]
    assert set(eager_answers[1]["text"].split()) <= {"yes", "no"}
    assert eager_answers[4]["meta_info"]["completion_tokens"] == 7
    assert reasons[0]["type"] == "length"
    assert eager_answers[2]["meta_info"]["output_top_logprobs"][0]


@pytest.fixture(scope="module")
def harsh_server() -> Any:
    """Overlap off, pages of 16, a retraction every third step, strict checks."""
    env = {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "3",
        "SGLANG_USE_PICKLE_IPC": "0",
    }
    flags = ("--disable-overlap-schedule", "--page-size", "16")
    with running_server(*EXACT, *flags, env=env) as server:
        yield server


@pytest.mark.parametrize("changes", [{"policy": "eager"}, *DEFERRING[:3]], ids=name_of)
def test_outputs_are_equal_under_forced_retraction_without_overlap(
    harsh_server: Server, stock_answers: Any, changes: dict[str, Any]
) -> None:
    requests = mixed_requests(with_penalty=False)
    answers, deferred = run_under(harsh_server, changes, requests)
    assert (deferred > 0) == (changes["policy"] != "eager")
    assert outputs(answers) == outputs(stock_answers)
    assert any(a["meta_info"].get("retraction_count", 0) for a in answers) or (
        "Testing retraction" in harsh_server.text_of_log()
    )


@pytest.fixture(scope="module")
def tiny_pool() -> Any:
    """Not enough KV for everybody at once: some requests have to wait."""
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    pool = ("--max-total-tokens", "300", "--max-running-requests", "16")
    with running_server(*EXACT, "--sleep-on-idle", env=env, pool=pool) as server:
        yield server


@pytest.mark.parametrize("policy", ["eager", "off", "taper"])
def test_outputs_are_equal_when_the_pool_is_too_small(
    tiny_pool: Server, stock_server: Server, policy: str
) -> None:
    requests = mixed_requests(with_penalty=False)
    for request in requests:
        request["sampling_params"]["max_new_tokens"] = 45
    expected = outputs(run_all(stock_server, requests))
    stock_server.flush()
    answers, _ = run_under(tiny_pool, {"policy": policy}, requests)
    assert outputs(answers) == expected
    steps = [s for s in tiny_pool.state()["recent_steps"] if s["policy"] == policy]
    assert max(step["num_rows"] for step in steps) < len(requests)
