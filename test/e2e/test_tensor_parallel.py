"""Three tensor-parallel CPU ranks plan the same rows at the same step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from workload import mixed_requests, outputs, run_all

from server import EXACT, Server, running_server


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Server]:
    """SmolLM2 has three KV heads. SGLang's checker stops ranks that disagree."""
    env = {
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0",
    }
    with running_server(*EXACT, "--tp-size", "3", env=env) as server:
        yield server


def test_ranks_agree_and_outputs_do_not_depend_on_the_policy(
    three_ranks: Server,
) -> None:
    requests = mixed_requests(with_penalty=False)
    found: dict[str, Any] = {}
    deferred: dict[str, int] = {}
    for changes in ({"policy": "eager"}, {"policy": "off"}, {"policy": "taper"}):
        if changes["policy"] == "taper":
            model = three_ranks.state()["latency_model"]
            assert model["trusted"], "the steps before have taught it"
            tpot_ms = 1.2 * (model["a_ms"] + 4 * model["b_ms_per_row"])
            changes = {**changes, "tpot_slo_ms": tpot_ms}
        three_ranks.set_policy(**changes)
        before = three_ranks.state()["counters"]["num_rows_deferred"]
        found[changes["policy"]] = outputs(run_all(three_ranks, requests))
        after = three_ranks.state()["counters"]["num_rows_deferred"]
        deferred[changes["policy"]] = after - before
        three_ranks.flush()
    assert found["off"] == found["eager"] == found["taper"]
    assert deferred["eager"] == 0
    assert deferred["off"] > 0
    assert deferred["taper"] > 0


def test_ranks_hold_prefills_and_let_them_go_at_the_same_step(
    three_ranks: Server,
) -> None:
    three_ranks.set_policy(policy="eager", prefill_hold_s=0.2)
    for _ in range(3):
        assert len(run_all(three_ranks, mixed_requests(with_penalty=False))) == 10
    three_ranks.set_policy(prefill_hold_s="off")
    assert three_ranks.state()["counters"]["num_prefills_held"] > 0


def test_the_policy_changes_on_all_ranks_while_requests_run(
    three_ranks: Server,
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    requests = mixed_requests(with_penalty=False)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_all, three_ranks, requests)
        for policy in ("off", "eager", "cap", "taper") * 2:
            three_ranks.set_policy(policy=policy)
        assert len(running.result()) == len(requests)
    assert three_ranks.state()["params"]["policy"] == "taper"
