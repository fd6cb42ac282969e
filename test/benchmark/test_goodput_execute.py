"""Requests of a workload are sent as a client program would send them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from goodput_lib.execute import Execution, Manner, Seen
from goodput_lib.stream import Target
from stand_in import StandIn

from sglang_taper.protocol import parse_branch_meta
from sglang_taper.workload.shape import make_shape


def execute(
    stand_in: StandIn,
    phases: Any,
    *,
    manner: Manner | None = None,
    timeout_s: float = 5.0,
    sends_metadata: bool = True,
) -> Seen:
    async def run() -> Seen:
        async with Target(stand_in.url, timeout_s, sends_metadata) as target:
            shape = make_shape(7, phases)
            return await Execution(target, shape, manner or Manner(), "seed").run()

    with stand_in.running():
        return asyncio.run(run())


def meta_of(body: dict[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = body["sampling_params"]["custom_params"]["taper"]
    parse_branch_meta(meta)
    return meta


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_fork_continues_what_was_generated_and_a_join_appends_in_order(
    cumulative: bool,
) -> None:
    server = StandIn(cumulative=cumulative)
    seen = execute(server, [2, [[3], [1]], 2])
    first, *branches, last = server.bodies
    assert seen.error is None
    assert len(first["input_ids"]) == 7
    prefix = branches[0]["input_ids"]
    assert prefix[:7] == first["input_ids"]
    assert len(prefix) == 9
    assert branches[1]["input_ids"] == prefix
    assert last["input_ids"][:9] == prefix
    # The longer branch, which is the first, comes first.
    assert len(last["input_ids"]) == 9 + 3 + 1
    assert (seen.num_tokens, seen.num_critical_tokens) == (8, 7)
    assert len(seen.forks_ms) == 1


def test_branches_say_whose_they_are() -> None:
    server = StandIn()
    execute(server, [1, [[2], [2]], 1, [[1], [1], [1]], 1])
    metas = [meta_of(body) for body in server.bodies]
    rids = [body["rid"] for body in server.bodies]
    assert len({meta["group"] for meta in metas}) == 1
    assert [meta.get("width", 1) for meta in metas] == [1, 2, 2, 1, 3, 3, 3, 1]
    assert [meta.get("stage", 0) for meta in metas] == [0, 1, 1, 1, 2, 2, 2, 2]
    assert [meta.get("depth", 0) for meta in metas] == [0, 1, 1, 0, 1, 1, 1, 0]
    assert [meta.get("parent") for meta in metas[1:3]] == [rids[0]] * 2
    assert [meta.get("parent") for meta in metas[4:7]] == [rids[3]] * 3


def test_nested_forks_count_every_token_once() -> None:
    server = StandIn()
    seen = execute(server, [2, [[1, [[2], [1]], 1], [4]], 2])
    assert (seen.num_tokens, seen.num_critical_tokens) == (13, 8)
    assert len(seen.forks_ms) == 2
    assert max(meta_of(body).get("depth", 0) for body in server.bodies) == 2


def test_own_tokens_of_branches_differ_and_stay_in_the_joined_text() -> None:
    server = StandIn()
    execute(server, [1, [[1], [1]], 1], manner=Manner(branch_own_tokens=3))
    _, one, other, last = (body["input_ids"] for body in server.bodies)
    assert len(one) == len(other) == 11
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]
    assert len(last) == 8 + 2 * (3 + 1)


def test_a_request_without_a_fork_has_no_group() -> None:
    server = StandIn()
    execute(server, [3])
    assert "custom_params" not in server.bodies[0]["sampling_params"]


def test_a_stock_server_is_told_nothing() -> None:
    server = StandIn()
    execute(server, [1, [[1], [1]], 1], sends_metadata=False)
    assert all("custom_params" not in b["sampling_params"] for b in server.bodies)


def test_a_failing_branch_fails_its_request_and_ends_its_siblings() -> None:
    server = StandIn(
        step_s=0.05, breaks=lambda body: meta_of(body).get("branch", 0) == 1
    )
    seen = execute(server, [1, [[50], [3]], 1])
    assert seen.error is not None
    assert "out of memory" in seen.error
    assert seen.ended_ms is None
    assert not seen.outcome().succeeded
    (healthy,) = [b for b in server.bodies[1:] if meta_of(b).get("branch", 0) == 0]
    assert healthy["rid"] in server.aborted


def test_a_request_that_takes_too_long_is_a_failure() -> None:
    seen = execute(StandIn(step_s=0.05), [100], timeout_s=0.2)
    assert seen.error == "not done after 0.2 s"
    assert not seen.outcome().succeeded
    assert seen.closed_ms - seen.sent_ms < 2000


def test_tokens_that_nobody_asked_for_are_a_failure() -> None:
    seen = execute(StandIn(num_extra=1), [2])
    assert seen.error is not None
    assert "asked for 2 tokens, got 3, the server counts 3" in seen.error


def test_gaps_after_a_fork_include_the_wait_for_the_first_token() -> None:
    seen = execute(StandIn(step_s=0.03), [2, [[2], [2]]])
    # One gap of the root, two of each branch: its first token was waited for as well.
    assert len(seen.gaps_ms) == 1 + 2 * 2
    assert min(seen.gaps_ms) > 20
