"""The goodput benchmark measures what it says on a real server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from server import Server

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import goodput
from goodput_lib.options import Options

TINY = (
    *("--num-prompts", "8", "--arrivals", "closed:3", "--serial-tokens", "8"),
    *("--prompt-tokens", "12", "--fan-out", "3-5", "--stages", "1-2", "--pdr", "0.6"),
    *("--decomposable-factor", "3", "--request-timeout-s", "60", "--rounds", "1"),
)


def compare(server: Server, *flags: str) -> list[dict[str, Any]]:
    options = Options.from_argv([*TINY, *flags, "--base-url", server.url])
    return asyncio.run(goodput.compare(options, print))


@pytest.fixture(scope="module")
def results(taper_server: Server) -> dict[str, dict[str, Any]]:
    policies = ("--policies", "off,eager,ledger", "--goodput", "ttft:60000")
    procedure = ("--slo-procedure", "--tpot-x", "3")
    found = compare(taper_server, *policies, *procedure)
    return {result["policy"]: result for result in found}


@pytest.mark.parametrize("policy", ["off", "eager", "ledger"])
def test_every_request_gets_its_tokens_and_the_ledger_agrees(
    results: dict[str, dict[str, Any]], policy: str
) -> None:
    result = results[policy]
    assert result["num_errors"] == 0
    assert result["completed"] == result["sent"] > 0
    assert result["engine"]["num_steps"] > 0
    # Each of them is one decode step of one row, but for first tokens from a prefill.
    rows, tokens = (
        result["engine"]["num_rows_admitted"],
        result["workload"]["output_tokens"],
    )
    assert tokens - result["workload"]["num_requests"] * 20 < rows <= tokens


def test_off_defers_and_eager_does_not(results: dict[str, dict[str, Any]]) -> None:
    assert results["eager"]["branch_steps_deferred"] == 0
    assert results["eager"]["engine"]["mean_rows_deferred"] == 0
    assert results["off"]["branch_steps_deferred"] > 0
    off, eager = (results[p]["engine"]["mean_rows_admitted"] for p in ("off", "eager"))
    assert off < eager


def test_the_result_says_what_it_was_measured_with(
    results: dict[str, dict[str, Any]],
) -> None:
    result = results["ledger"]
    assert result["tpot_slo_x"] == pytest.approx(3)
    assert result["planned_slos_ms"]["tpot"] == pytest.approx(
        3 * result["off_ms_between_tokens"]
    )
    assert result["server"]["weights"] == "real"
    assert result["server"]["arguments"]["dtype"] == "float32"
    assert result["test_switch"] is None
    assert 0 < result["workload"]["parallel_duty"] <= 1
    assert result["client_cpu_share"] < 1


def test_programs_are_a_workload_whose_forks_the_server_recognises(
    taper_server: Server,
) -> None:
    before = taper_server.state()["counters"]["num_branches"]
    programs = ("--programs", "tree,chains,skeleton,judge,chat")
    flags = ("--policies", "eager", "--goodput", "tpot:60000", "--seed", "3")
    (result,) = compare(taper_server, *programs, *flags)
    assert result["num_errors"] == 0, result["errors"]
    assert result["workload"]["num_requests"] == 8
    assert 0 < result["workload"]["pdr"] <= 1
    assert result["workload"]["abf"] > 1
    assert taper_server.state()["counters"]["num_branches"] - before > 8
