"""On a CUDA device: a fork whose prefix is read once says what stock SGLang says.

In bf16, with CUDA graphs and without. The arithmetic is not the same, so where two
tokens are nearly as likely either may come; everything else must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forking import Answer, assert_idle_pool, ids_of, in_one_call, new_group
from workload import STORY, TOPICS, branch_request

from server import Server, running_server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLASHINFER = ("--attention-backend", "flashinfer", "--dtype", "bfloat16")
EAGER = ("--disable-cuda-graph",)
NEW_TOKENS = 32
# Difference of log-probability below which two tokens may change places.
NEARLY_EQUAL = 0.1


@pytest.fixture(scope="module", params=["graphs", "eager"])
def mode(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return EAGER if request.param == "eager" else ()


@pytest.fixture(scope="module")
def stock(mode: tuple[str, ...]) -> Iterator[list[Answer]]:
    with running_server(*FLASHINFER, *mode, module="sglang.launch_server") as server:
        yield server.generate(fork())


@pytest.fixture(scope="module", params=["flashinfer", "triton"])
def sharing(request: pytest.FixtureRequest, mode: tuple[str, ...]) -> Iterator[Server]:
    wanted = ("--shared-prefix-attention", request.param)
    with running_server(*FLASHINFER, *mode, *wanted) as server:
        server.set_policy(policy="eager")
        yield server
        assert_idle_pool(server)


def fork() -> dict[str, Any]:
    """Five branches over some four hundred tokens."""
    group = new_group()
    bodies = []
    for index, topic in enumerate(TOPICS):
        text = 12 * (STORY + "\n") + topic
        body = branch_request(
            text, group, index, len(TOPICS), max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        bodies.append(body | {"return_logprob": True, "top_logprobs_num": 2})
    return in_one_call(bodies)


def assert_same(ours: Answer, theirs: Answer) -> None:
    """Equal ids up to where stock itself was nearly undecided."""
    for position, (a, b) in enumerate(zip(*ids_of([ours, theirs]), strict=True)):
        if a != b:
            first, second = theirs["meta_info"]["output_top_logprobs"][position][:2]
            assert first[0] - second[0] < NEARLY_EQUAL, position
            assert a == second[1], position
            return


def test_greedy_text_of_a_fork_equals_stock(
    sharing: Server, stock: list[Answer]
) -> None:
    before = sharing.state()["attention"]
    for _ in range(2):  # computed, then from the cache
        for ours, theirs in zip(sharing.generate(fork()), stock, strict=True):
            assert_same(ours, theirs)
    after = sharing.state()["attention"]
    assert after["fallbacks"] == {}
    steps = after["num_shared_steps"] - before["num_shared_steps"]
    assert steps > NEW_TOKENS
    saved = after["num_saved_tokens"] - before["num_saved_tokens"]
    assert saved > steps * 300


def test_rows_that_are_deferred_leave_the_others_right(
    sharing: Server, stock: list[Answer]
) -> None:
    sharing.set_policy(policy="cap", cap=3)
    for ours, theirs in zip(sharing.generate(fork()), stock, strict=True):
        assert_same(ours, theirs)
    sharing.set_policy(policy="eager")


def test_the_planner_counts_the_prefix_once(sharing: Server) -> None:
    sharing.generate(fork())
    state = sharing.state()
    assert state["latency_model"]["shared_read_once"] is True
    full = [s for s in state["recent_steps"] if s["num_admitted"] == len(TOPICS)]
    # the first steps are planned before the slots of the branches are known
    assert full[-1]["kv_tokens"] < full[0]["kv_tokens"] / 2
