"""Timelines of forks on SGLang's own scheduler without a model (fork_engine.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from fork_engine import ForkEngine
from fork_parts import Shape, engine_settings
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_taper.engine.explain import describe_request
from sglang_taper.engine.machine import describe
from sglang_taper.engine.messages import EXPLAIN, LIVE
from sglang_taper.engine.records import (
    DEFERRED,
    MAX_MARKS,
    RUNNING,
    BranchRecord,
    Mark,
)
from sglang_taper.policy.admission import make_policy
from sglang_taper.policy.state import BranchState, RequestState
from sglang_taper.policy.types import AdmissionPlan, StepView
from sglang_taper.probe import PROBE_RID
from sglang_taper.protocol import BranchMeta

PROMPT = [i % 11 for i in range(40)]
FORK = {"group": "g", "depth": 1, "width": 4, "parent": "root"}
LENGTH = 12


class WithBudget:
    """`off`, as if a budget had allowed no more."""

    def __init__(self) -> None:
        self._off = make_policy("off")

    def plan(self, step: StepView) -> AdmissionPlan:
        rows = self._off.plan(step).rows
        reason = "all" if len(rows) == step.num_rows else "budget"
        return AdmissionPlan(rows, reason, budget_ms=21.0, min_slack_ms=3.0)


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[ForkEngine]:
    shape = Shape("rust", 1, request.param)
    with engine_settings(shape):
        engine = ForkEngine(shape)
        engine.taper.policy = WithBudget()
        yield engine


def send(engine: ForkEngine, rid: str, tokens: list[int], **meta: Any) -> Any:
    req = engine.send(rid, tokens, LENGTH, BranchMeta(**meta).to_wire())
    req.sampling_params.ignore_eos = True
    return req


def run(engine: ForkEngine, num_steps: int = 10_000) -> None:
    for _ in range(num_steps):
        engine.pass_time(0.01)
        if not engine.step():
            return


def explain(engine: ForkEngine, id: str) -> dict[str, Any]:
    told = describe(engine, EXPLAIN, {"id": id})
    json.dumps(told)
    return told


def live(engine: ForkEngine, after_step: int = 0) -> dict[str, Any]:
    shown = describe(engine, LIVE, {"after_step": after_step})
    json.dumps(shown)
    return shown


def program(engine: ForkEngine) -> dict[str, Any]:
    """A serial stage, a fork into four, a join; what is told of it afterwards."""
    root = send(engine, "root", PROMPT, group="g")
    run(engine)
    text = [*PROMPT, *root.output_ids]
    for i in range(4):
        send(engine, f"child-{i}", [*text, i], branch=i, **FORK)
    run(engine)
    send(engine, "joined", [*text, 9, 9], group="g", stage=1)
    run(engine)
    return explain(engine, "g")


def test_a_program_is_told_from_its_fork_to_its_join(engine: ForkEngine) -> None:
    told = program(engine)
    assert told["kind"] == "request"
    assert [b["rid"] for b in told["branches"]] == [
        *("root", "child-0", "child-1", "child-2", "child-3", "joined")
    ]
    (fork,) = told["forks"]
    assert (fork["width"], fork["num_ended"], fork["parent"]) == (4, 4, "root")
    assert fork["joined_by"] == "joined"
    assert fork["opened_ms"] < fork["ended_ms"] <= fork["joined_ms"]
    assert all(b["status"] == "done" for b in told["branches"])


def test_spans_of_a_branch_are_without_gap_and_count_its_steps(
    engine: ForkEngine,
) -> None:
    told = program(engine)
    deferred = 0
    for branch in told["branches"]:
        spans = branch["spans"]
        assert [s["status"] for s in spans[:2]] == ["queued", "prefill"]
        assert spans[0]["from_ms"] == branch["arrived_ms"]
        assert spans[-1]["to_ms"] == pytest.approx(branch["ended_ms"])
        for before, after in pairwise(spans):
            assert before["to_ms"] == pytest.approx(after["from_ms"])
        left_out = [s for s in spans if s["status"] == "deferred"]
        num_steps = [s["to_step"] - s["from_step"] + 1 for s in left_out]
        assert sum(num_steps) == branch["steps_deferred"]
        deferred += len(left_out)
    assert deferred > 8


def test_a_deferral_names_the_constraint_and_who_was_most_urgent(
    engine: ForkEngine,
) -> None:
    told = program(engine)
    spans = [s for b in told["branches"] for s in b["spans"]]
    deferred = [s for s in spans if s["status"] == "deferred"]
    assert {s["reason"] for s in deferred} == {"budget"}
    assert {s["urgent"] for s in deferred} == {"g"}
    assert {s["budget_ms"] for s in deferred} == {21.0}
    assert all(isinstance(s["urgent_slack_ms"], float) for s in deferred)
    assert all("reason" not in s for s in spans if s["status"] != "deferred")


def test_one_branch_is_told_by_its_own_id(engine: ForkEngine) -> None:
    program(engine)
    told = explain(engine, "child-2")
    assert told["kind"] == "branch"
    assert [b["rid"] for b in told["branches"]] == ["child-2"]
    assert told["request"]["id"] == "g"


def test_an_unknown_id_is_told_nothing_of(engine: ForkEngine) -> None:
    program(engine)
    assert explain(engine, "nobody") == {}


def test_an_aborted_branch_is_not_done(engine: ForkEngine) -> None:
    send(engine, "root", PROMPT, group="g")
    run(engine, 4)
    engine.abort("root")
    run(engine)
    (branch,) = explain(engine, "root")["branches"]
    assert (branch["status"], branch["finish"]) == ("aborted", "abort")


def test_the_live_view_shows_each_branch_as_it_is(engine: ForkEngine) -> None:
    for i in range(4):
        send(engine, f"child-{i}", [*PROMPT, i], branch=i, **FORK)
    assert set(live(engine)["requests"][0]["branches"]["status"]) == {"queued"}
    run(engine, 8)
    shown = live(engine)
    (request,) = shown["requests"]
    branches = request["branches"]
    assert branches["rid"] == [f"child-{i}" for i in range(4)]
    assert sorted(branches["status"]) == [*["deferred"] * 3, "running"]
    for status, number in zip(branches["status"], branches["deferral"], strict=True):
        assert (number is not None) == (status == "deferred")
    assert {mark["reason"] for mark in shown["deferrals"]} == {"budget"}
    run(engine)
    assert live(engine)["requests"] == []


def test_branches_that_share_a_mark_send_it_once(engine: ForkEngine) -> None:
    for i in range(4):
        send(engine, f"child-{i}", [*PROMPT, i], branch=i, **FORK)
    run(engine, 7)
    shown = live(engine)
    numbers = shown["requests"][0]["branches"]["deferral"]
    assert len(shown["deferrals"]) == len({n for n in numbers if n is not None})


def test_steps_the_page_has_seen_are_not_sent_again(engine: ForkEngine) -> None:
    send(engine, "root", PROMPT, group="g")
    run(engine, 6)
    steps = live(engine)["steps"]["step"]
    assert len(steps) > 2
    assert live(engine, steps[-2])["steps"]["step"] == steps[-1:]


def test_neither_view_holds_tokens_or_text(engine: ForkEngine) -> None:
    """Whatever is a list in them is a column, and shorter than the prompt."""
    told = program(engine)
    assert {key for b in told["branches"] for key in b if "ids" in key} == set()
    assert not any(
        isinstance(v, list)
        for b in told["branches"]
        for k, v in b.items()
        if k != "spans"
    )


def test_what_came_before_the_remembered_spans_is_told_as_forgotten() -> None:
    meta = BranchMeta(group="g", width=2)
    owner = RequestState("g", 0.0, 2000.0, 50.0)
    record = BranchRecord("r", meta, BranchState(owner, 0, 0, 8), 0.0)
    record.first_token_ms = 5.0
    for step in range(MAX_MARKS + 1):
        status = RUNNING if step % 2 else DEFERRED
        record.add(Mark(step, 10.0 + step, status, "cap"))
    told = describe_request([record], "g", 999.0, ())
    (branch,) = told["branches"]
    assert branch["num_spans_forgotten"] == 1
    assert [s["status"] for s in branch["spans"][:3]] == [
        *("queued", "forgotten", "running")
    ]
    assert branch["spans"][1]["to_ms"] == 11.0


@pytest.mark.parametrize("rid", [f"{PROBE_RID}1-0", f"{HEALTH_CHECK_RID_PREFIX}_1"])
def test_the_servers_own_requests_are_not_counted_against_slos(
    engine: ForkEngine, rid: str
) -> None:
    send(engine, rid, PROMPT)
    run(engine)
    assert engine.taper.counters.num_requests_ended == 0
    send(engine, "a client's", PROMPT)
    run(engine)
    assert engine.taper.counters.num_requests_ended == 1
