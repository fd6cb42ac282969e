"""What leaving rows out costs: a deferring step against a full one, in a real server.

Both steps run the same number of rows over the same contexts. In the full one they
are the whole batch; in the deferring one three times as many rows wait beside them,
so the view must be planned, cut out and written back. Rounds are interleaved; the
figure is the difference of the medians.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from sglang_taper.frontend.branch import with_branch
from sglang_taper.protocol import BranchMeta
from sglang_taper.server_process import ServerProcess

NUM_REQUESTS = 4
WIDTH = 4
NEW_TOKENS = 24
ROUNDS = 5
PROMPT = "Once upon a time a small robot lived in a big library."


def body(group: int, branch: int, width: int, num_tokens: int) -> dict[str, Any]:
    meta = BranchMeta(group=f"g{group}", branch=branch, width=width)
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": num_tokens}
    return {
        "text": f"{group}{branch} {PROMPT}",
        "sampling_params": with_branch(sampling, meta),
    }


def run_round(url: str, policy: str, width: int, num_tokens: int) -> list[float]:
    """Measured ms of the steps in which all `NUM_REQUESTS` groups had a row run."""
    requests.post(f"{url}/taper/policy", json={"policy": policy}, timeout=60)
    first = requests.get(f"{url}/taper/state", timeout=60).json()["counters"]
    bodies = [
        body(group, branch, width, num_tokens)
        for group in range(NUM_REQUESTS)
        for branch in range(width)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda b: requests.post(f"{url}/generate", json=b), bodies))
    steps = requests.get(f"{url}/taper/state", timeout=60).json()["recent_steps"]
    requests.post(f"{url}/flush_cache", timeout=60)
    return [
        step["measured_ms"]
        for step in steps
        if step["step"] > first["num_steps"]
        and step["num_admitted"] == NUM_REQUESTS
        and step["num_rows"] == NUM_REQUESTS * width
        and step["measured_ms"]
    ]


def measure_overhead(url: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Medians of full and deferring steps in ms, and their difference."""
    full: list[float] = []
    deferring: list[float] = []
    for _ in range(rounds):
        full += run_round(url, "eager", 1, NEW_TOKENS)
        deferring += run_round(url, "off", WIDTH, NEW_TOKENS // WIDTH)
    full_ms, deferring_ms = statistics.median(full), statistics.median(deferring)
    return {
        "rows_that_run": NUM_REQUESTS,
        "rows_in_the_batch": NUM_REQUESTS * WIDTH,
        "num_full_steps": len(full),
        "num_deferring_steps": len(deferring),
        "full_step_ms": round(full_ms, 3),
        "deferring_step_ms": round(deferring_ms, 3),
        "overhead_ms": round(deferring_ms - full_ms, 3),
        "overhead_share": round(deferring_ms / full_ms - 1, 4),
    }


def measure_in_new_server(model_path: str) -> dict[str, Any]:
    """Start a server for the measurement and end it."""
    server = ServerProcess(model_path)
    try:
        asyncio.run(server.ready(lambda line: print(line, file=sys.stderr)))
        return measure_overhead(server.url)
    finally:
        server.stop(keep_log=False)


def format_overhead(found: dict[str, Any]) -> str:
    return (
        f"real server, {found['rows_that_run']} rows run: "
        f"full step {found['full_step_ms']} ms "
        f"(p50 of {found['num_full_steps']}), with "
        f"{found['rows_in_the_batch'] - found['rows_that_run']} more rows deferred "
        f"{found['deferring_step_ms']} ms (p50 of {found['num_deferring_steps']}): "
        f"overhead {found['overhead_ms']} ms, {100 * found['overhead_share']:.1f} %"
    )


if __name__ == "__main__":
    print(format_overhead(measure_in_new_server("smollm2")))
