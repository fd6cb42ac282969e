"""The fork latency benchmark measures what it says, on two servers that are there."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from server import Server

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import fork_latency
from fork_latency import OWN_TOKENS, SITUATIONS, Cell

FAN_OUT, PREFIX, REPEATS = 3, 48, 2


@pytest.fixture(scope="module")
def results(taper_server: Server, stock_server: Server) -> Any:
    taper_server.set_policy(policy="eager")
    urls = {"ours": taper_server.url, "stock": stock_server.url}
    cells = [Cell(situation, FAN_OUT, PREFIX) for situation in SITUATIONS]
    return asyncio.run(fork_latency.measure(urls, cells, REPEATS, print))


# (least, most). Of what a parent generated the last token has no KV yet: the first
# child computes it for all, or each does.
OWN = FAN_OUT * OWN_TOKENS
OURS = {
    "cold": (PREFIX + OWN, PREFIX + OWN),
    "warm": (OWN + 1, OWN + FAN_OUT),
    "n": (0, 0),
}
STOCK = {
    "cold": (PREFIX + OWN, FAN_OUT * PREFIX + OWN),
    "warm": (OWN + FAN_OUT, OWN + FAN_OUT),
    "n": (FAN_OUT, FAN_OUT),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_prefilled_tokens_are_those_of_the_children(
    results: Any, situation: str
) -> None:
    found = results[Cell(situation, FAN_OUT, PREFIX)]
    for name, limits in (("ours", OURS), ("stock", STOCK)):
        least, most = limits[situation]
        assert len(found[name].prefilled_tokens) == REPEATS
        assert all(least <= tokens <= most for tokens in found[name].prefilled_tokens)


def test_every_measurement_is_in_the_table_and_in_the_json(results: Any) -> None:
    rows = [fork_latency.row_of(cell, found) for cell, found in results.items()]
    table = fork_latency.markdown_table(rows).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [
        f"| {s}" for s in SITUATIONS
    ]
    facts = json.loads(json.dumps(fork_latency.facts_of(results)))
    for fact in facts:
        for name in ("ours", "stock"):
            assert len(fact[name]["latency_ms"]) == REPEATS
            assert min(fact[name]["latency_ms"]) > 0


def test_the_pool_holds_private_copies_of_the_widest_fork() -> None:
    cells = [Cell("cold", 2, 4096), Cell("n", 32, 1024)]
    assert fork_latency.pool_tokens(cells) > 32 * 1024
