"""Attention that reads a shared prefix once says what stock attention says.

In float32 on the CPU, where SGLang's own attention is `torch_native`. Three servers of
ours: with the C kernel, with PyTorch's operators and pages of 16, and with sharing off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forking import (
    STRICT,
    Answer,
    assert_idle_pool,
    branch_of,
    ids_of,
    in_one_call,
    meta_of,
    new_group,
    some_ids,
    stream,
)
from workload import STORY, logprobs, mixed_requests, outputs, run_all

from server import EXACT, Server, running_server
from sglang_taper.engine.attention.cpu_ops import why_not_native

FAN_OUT, PREFIX = 8, 700
PROMPTS = (
    STORY,
    "The capital of France is",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "Q: Why is the sky blue?\nA:",
)


@pytest.fixture(scope="module")
def pages_of_16() -> Iterator[Server]:
    flags = ("--page-size", "16", "--shared-prefix-attention", "torch")
    with running_server(*EXACT, *flags, env=STRICT) as server:
        yield server


@pytest.fixture(scope="module")
def sharing_off() -> Iterator[Server]:
    with running_server(*EXACT, "--shared-prefix-attention", "off") as server:
        yield server


@pytest.fixture(params=["taper_server", "pages_of_16"])
def sharing(request: pytest.FixtureRequest) -> Iterator[Server]:
    server: Server = request.getfixturevalue(request.param)
    server.set_policy(policy="eager")
    server.flush()
    yield server
    assert_idle_pool(server)


def attention(server: Server) -> dict[str, Any]:
    return dict(server.state()["attention"])


def saved(server: Server, before: dict[str, Any]) -> int:
    """KV tokens not read again since `before`."""
    return int(attention(server)["num_saved_tokens"] - before["num_saved_tokens"])


def texts() -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": 24}
    return [
        {"text": text, "sampling_params": sampling, "return_logprob": True}
        for text in PROMPTS
    ]


def fork(own: int, new_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """One call: a prefix, and `own` tokens of each branch."""
    group, prefix = new_group(), some_ids("attention", PREFIX)
    bodies = [
        branch_of(
            group,
            [*prefix, *some_ids(i, own * (i + 1))],
            i,
            FAN_OUT,
            depth=1,
            max_new_tokens=new_tokens,
            **more,
        )
        for i in range(FAN_OUT)
    ]
    return in_one_call(bodies)


def nested() -> dict[str, Any]:
    """Two branches that fork again: four rows over two levels of prefix."""
    group, root = new_group(), some_ids("root", 300)
    bodies = [
        branch_of(
            group,
            [*root, *some_ids(f"inner {i // 2}", 600), *some_ids(f"leaf {i}", 3)],
            i,
            4,
            depth=1,
        )
        for i in range(4)
    ]
    return in_one_call(bodies)


@pytest.fixture(scope="module")
def stock(stock_server: Server) -> dict[str, Any]:
    stock_server.flush()
    return {
        "texts": run_all(stock_server, texts()),
        "mixed": run_all(stock_server, mixed_requests(with_penalty=False)),
        "own": stock_server.generate(fork(own=3)),
        "alias": stock_server.generate(fork(own=0)),
        "nested": stock_server.generate(nested()),
    }


def test_the_kernel_serves_unless_pytorch_is_asked_for(
    taper_server: Server, pages_of_16: Server
) -> None:
    missing = why_not_native(torch.float32)
    used = attention(taper_server)
    assert used["backend"] == ("torch" if missing else "native")
    assert used.get("why_not_native") == missing
    asked_for = attention(pages_of_16)
    assert asked_for["backend"] == "torch"
    assert "why_not_native" not in asked_for


def test_greedy_text_and_logprobs_equal_stock(
    sharing: Server, stock: dict[str, Any]
) -> None:
    answers = run_all(sharing, texts())
    assert outputs(answers) == outputs(stock["texts"])
    for ours, theirs in zip(answers, stock["texts"], strict=True):
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)


def test_forks_beside_serial_requests_equal_stock(
    sharing: Server, stock: dict[str, Any]
) -> None:
    answers = run_all(sharing, mixed_requests(with_penalty=False))
    assert outputs(answers) == outputs(stock["mixed"])


@pytest.mark.parametrize(("name", "own"), [("own", 3), ("alias", 0)])
def test_branches_of_a_fork_read_its_prefix_once(
    sharing: Server, stock: dict[str, Any], name: str, own: int
) -> None:
    before = attention(sharing)
    answers: list[Answer] = sharing.generate(fork(own))
    assert ids_of(answers) == ids_of(stock[name])
    # all eight rows for most of the steps, over all but the last page
    assert saved(sharing, before) >= 10 * (FAN_OUT - 1) * (PREFIX - 16)
    assert attention(sharing)["fallbacks"] == {}
    if own == 0:
        assert any(meta_of(answer)["row_aliased"] for answer in answers)


def test_branches_that_fork_again_read_both_prefixes_once(
    sharing: Server, stock: dict[str, Any]
) -> None:
    before = attention(sharing)
    answers = sharing.generate(nested())
    assert ids_of(answers) == ids_of(stock["nested"])
    steps = attention(sharing)["num_shared_steps"] - before["num_shared_steps"]
    assert steps >= 4
    # three rows that do not read the root again, two that do not read their parent
    assert saved(sharing, before) > 4 * (3 * (300 - 16) + 2 * (600 - 16))


def test_rows_of_deferred_branches_still_share(
    sharing: Server, stock: dict[str, Any]
) -> None:
    sharing.set_policy(policy="cap", cap=3)
    before = attention(sharing)
    answers = sharing.generate(fork(own=3))
    assert ids_of(answers) == ids_of(stock["own"])
    assert saved(sharing, before) >= 10 * 2 * (PREFIX - 16)


def test_an_abort_midway_leaves_the_others_right(
    sharing: Server, stock: dict[str, Any]
) -> None:
    group = new_group()
    body = branch_of(group, some_ids("gone", PREFIX), n=3, max_new_tokens=200)
    for _ in zip(range(4), stream(sharing, body), strict=False):
        pass
    answers = sharing.generate(fork(own=3))
    sharing.post("/abort_request", {"group": group})
    assert ids_of(answers) == ids_of(stock["own"])


def test_off_means_stock_attention(sharing_off: Server, stock: dict[str, Any]) -> None:
    assert attention(sharing_off) == {"backend": "stock"}
    assert sharing_off.state()["latency_model"]["shared_read_once"] is False
    sharing_off.set_policy(policy="eager")
    answers = sharing_off.generate(fork(own=3))
    assert ids_of(answers) == ids_of(stock["own"])


def test_the_planner_counts_a_shared_prefix_once(sharing: Server) -> None:
    sharing.generate(fork(own=3))
    state = sharing.state()
    assert state["latency_model"]["shared_read_once"] is True
    full = [s for s in state["recent_steps"] if s["num_admitted"] == FAN_OUT]
    assert full
    assert max(s["kv_tokens"] for s in full) < 2 * PREFIX
