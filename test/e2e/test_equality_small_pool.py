"""Equal outputs also when requests wait for memory. A file of its own, so that its
server does not run beside those of test_equality.py."""

from __future__ import annotations

from typing import Any

import pytest
from workload import mixed_requests, outputs, run_all, run_under

from server import EXACT, Server, running_server


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
