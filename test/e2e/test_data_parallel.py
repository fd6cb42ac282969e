"""Two data-parallel ranks: the branches of a request stay where their prefix is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from forking import (
    branch_of,
    in_one_call,
    meta_of,
    new_group,
    reason_of,
    some_ids,
    together,
    wait_for,
)

from server import EXACT, Server, running_server
from sglang_taper.engine.dp_ranks import rank_of_group

PREFIX_TOKENS = 64


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    # Without this SGLang wants a NUMA node for each rank.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with running_server(*EXACT, "--dp-size", "2", env=env) as server:
        yield server


def rank_of(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["dp_rank"])


def fork(group: str, width: int = 4) -> list[dict[str, Any]]:
    """Bodies of branches that share `PREFIX_TOKENS` tokens only they have."""
    prefix = some_ids(group, PREFIX_TOKENS)
    return [
        branch_of(group, [*prefix, *some_ids(branch, 4)], branch, width, depth=1)
        for branch in range(width)
    ]


def groups_of(rank: int, count: int) -> list[str]:
    names = (new_group() for _ in range(10_000))
    return [name for name in names if rank_of_group(name, 2) == rank][:count]


def test_branches_sent_one_by_one_find_the_prefix_on_their_rank(
    two_ranks: Server,
) -> None:
    for group in (*groups_of(0, 2), *groups_of(1, 2)):
        answers = together(two_ranks, fork(group))
        assert {rank_of(a) for a in answers} == {rank_of_group(group, 2)}
        shared = sorted(meta_of(a)["prefix_tokens_shared"] for a in answers)
        assert shared[1] >= PREFIX_TOKENS


def test_the_items_of_a_batch_go_to_the_ranks_of_their_own_groups(
    two_ranks: Server,
) -> None:
    (here,), (there,) = groups_of(0, 1), groups_of(1, 1)
    bodies = [
        body for pair in zip(fork(here), fork(there), strict=True) for body in pair
    ]
    answers = two_ranks.generate(in_one_call(bodies))
    assert [rank_of(a) for a in answers] == [0, 1] * 4


def test_the_samples_of_one_prompt_stay_together_without_a_group_of_the_client(
    two_ranks: Server,
) -> None:
    for _ in range(3):
        sampling = {"n": 4, "max_new_tokens": 4, "temperature": 0}
        body = {"text": "The harbour town", "sampling_params": sampling}
        answers = two_ranks.generate(body)
        assert len({rank_of(a) for a in answers}) == 1
        assert [meta_of(a)["branch"] for a in answers] == [0, 1, 2, 3]


def test_a_later_stage_meets_what_its_group_has_computed(two_ranks: Server) -> None:
    (group,) = groups_of(1, 1)
    first = two_ranks.generate(branch_of(group, some_ids(group, PREFIX_TOKENS)))
    ids = [*some_ids(group, PREFIX_TOKENS), *first["output_ids"], *some_ids(1, 4)]
    second = two_ranks.generate(branch_of(group, ids))
    assert rank_of(first) == rank_of(second) == 1
    assert meta_of(second)["prefix_tokens_shared"] >= PREFIX_TOKENS


def test_a_rank_named_by_the_client_wins(two_ranks: Server) -> None:
    (group,) = groups_of(0, 1)
    bodies = [body | {"routed_dp_rank": 1} for body in fork(group)]
    assert {rank_of(a) for a in together(two_ranks, bodies)} == {1}


def test_requests_without_a_group_are_balanced_by_sglang(two_ranks: Server) -> None:
    sampling = {"max_new_tokens": 1, "temperature": 0}
    bodies = [
        {"input_ids": some_ids(i, 4), "sampling_params": sampling} for i in range(4)
    ]
    ranks = [rank_of(two_ranks.generate(body)) for body in bodies]
    assert sorted(ranks) == [0, 0, 1, 1]


def test_every_rank_answers_control_requests(two_ranks: Server) -> None:
    changed = two_ranks.set_policy(policy="off")
    assert [rank["params"]["policy"] for rank in changed["dp_ranks"]] == ["off"] * 2
    two_ranks.set_policy(policy="taper")
    states = two_ranks.state()["dp_ranks"]
    assert [state["dp_rank"] for state in states] == [0, 1]
    assert all(state["latency_model"]["num_samples"] > 0 for state in states)
    assert all(state["counters"]["num_branches"] > 0 for state in states)


def test_aborting_a_group_reaches_the_rank_that_runs_it(two_ranks: Server) -> None:
    (group,) = groups_of(1, 1)
    bodies = fork(group, 2)
    for body in bodies:
        body["sampling_params"]["max_new_tokens"] = 2000
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(two_ranks.generate, body) for body in bodies]
        wait_for(lambda: two_ranks.state()["dp_ranks"][1]["num_live_groups"])
        assert two_ranks.post("/abort_request", {"group": group}).status_code == 200
        assert {reason_of(f.result()) for f in running} == {"abort"}
