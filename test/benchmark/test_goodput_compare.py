"""A whole comparison against a stand-in: what runs, in what order, what is written."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import goodput
import pytest
from goodput_lib.options import Options
from stand_in import PARAMS, StandIn

SHAPES = (
    *("--prompt-tokens", "5", "--serial-tokens", "4", "--fan-out", "2-3"),
    *("--decomposable-factor", "2", "--stages", "1"),
)


def compare(*flags: str, stand_in: StandIn | None = None) -> list[dict[str, Any]]:
    with (stand_in or StandIn(step_s=0.002)).running() as server:
        options = Options.from_argv([*SHAPES, *flags, "--base-url", server.url])
        return asyncio.run(goodput.compare(options, print))


CLOSED = ("--num-prompts", "8", "--arrivals", "closed:2")


def switches(server: StandIn) -> list[dict[str, Any]]:
    """The policies of the runs: the server gets its own one back after the last."""
    *switched, restored = server.policies
    assert restored == PARAMS
    return switched


def test_policies_take_turns_and_begin_each_round_with_another() -> None:
    server = StandIn()
    policies = ("--policies", "off,eager,ledger", "--rounds", "2")
    results = compare(*CLOSED, *policies, "--goodput", "tpot:50", stand_in=server)
    order = ["off", "eager", "ledger", "eager", "ledger", "off"]
    assert [change["policy"] for change in switches(server)] == order
    assert [result["policy"] for result in results] == order
    assert [result["round"] for result in results] == [0, 0, 0, 1, 1, 1]
    assert server.num_flushes == 6


def test_all_policies_of_a_round_get_the_same_requests() -> None:
    server = StandIn()
    policies = ("--policies", "off,eager", "--rounds", "2")
    results = compare(*CLOSED, *policies, "--goodput", "tpot:50", stand_in=server)
    # What was generated begins at 50,000.
    prompts = Counter(
        tuple(token for token in body["input_ids"][:5] if token < 50_000)
        for body in server.bodies
    )
    assert len(prompts) == 2 * 8
    assert all(count % 2 == 0 for count in prompts.values())
    assert results[0]["workload"] == results[1]["workload"]
    assert results[0]["workload"]["seed"] != results[2]["workload"]["seed"]


def test_a_policy_starts_from_the_servers_own_parameters() -> None:
    server = StandIn()
    policies = ("--policies", "taper:rho=0.8,deadline=progress,taper", "--rounds", "1")
    compare(*CLOSED, *policies, "--goodput", "ttft:900", "tpot:50", stand_in=server)
    first, second = switches(server)
    assert (first["rho"], first["deadline"]) == (0.8, "progress")
    assert (second["rho"], second["deadline"]) == (None, "schedule")
    assert second["ttft_slo_ms"] == 900
    assert second["tpot_slo_ms"] == 50


def test_the_procedure_measures_off_and_runs_only_what_looks_at_slos_again() -> None:
    server = StandIn(step_s=0.004)
    flags = ("--policies", "off,eager,ledger", "--rounds", "1", "--slo-procedure")
    results = compare(*CLOSED, *flags, "--tpot-x", "1.2,2", stand_in=server)
    assert [change["policy"] for change in switches(server)] == [
        *("off", "eager", "ledger", "ledger")
    ]
    slos = [(r["policy"], round(r["tpot_slo_x"], 3)) for r in results]
    assert slos == [(p, x) for p in ("off", "eager", "ledger") for x in (1.2, 2.0)]
    # The first two were scored at both targets, the last ran for each.
    assert len({result["run"] for result in results}) == 4
    off_ms = results[0]["off_ms_between_tokens"]
    # Requests that fork give several tokens a step.
    assert 1 < off_ms < 20
    planned = [change["tpot_slo_ms"] for change in switches(server)[2:]]
    assert planned == pytest.approx([1.2 * off_ms, 2 * off_ms])


def test_an_open_loop_tells_the_rate_at_attainment() -> None:
    flags = ("--num-prompts", "10", "--arrivals", "poisson", "--policies", "off")
    rates = ("--request-rates", "20,40", "--rounds", "1", "--goodput", "tpot:5000")
    results = compare(*flags, *rates)
    assert [result["request_rate"] for result in results] == [20, 40]
    assert results[-1]["rate_at_attainment"] == 40


def test_a_policy_that_loses_most_requests_is_not_tried_at_higher_rates() -> None:
    flags = ("--num-prompts", "10", "--arrivals", "poisson", "--policies", "off")
    rates = ("--request-rates", "20,40", "--rounds", "1", "--goodput", "tpot:0.01")
    results = compare(*flags, *rates)
    assert [result["request_rate"] for result in results] == [20]
    assert results[-1]["rate_at_attainment"] is None


def test_no_run_starts_after_the_time_budget() -> None:
    flags = ("--policies", "off", "--rounds", "50", "--goodput", "tpot:50")
    results = compare(*CLOSED, *flags, "--time-budget-s", "0.3")
    assert 1 <= len(results) < 50


def test_results_are_appended_as_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    flags = ("--policies", "off", "--rounds", "2", "--goodput", "tpot:50")
    details = ("--output-file", str(file), "--output-details")
    compare(*CLOSED, *flags, *details)
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert [result["round"] for result in results] == [0, 1]
    for result in results:
        assert result["workload"]["num_requests"] == 8
        assert result["server"]["weights"] == "random"
        assert result["tpot"]["p99"] == result["p99_tpot_ms"]
        assert result["tpot_critical"]["mean"] >= result["tpot"]["mean"] > 0
        assert len(result["requests"]) == result["sent"] > 0
        assert result["num_errors"] == 0


def test_failed_requests_are_misses_and_their_errors_are_shown() -> None:
    server = StandIn(step_s=0.002, breaks=lambda body: True)
    flags = ("--policies", "off", "--rounds", "1", "--goodput", "tpot:50")
    (result,) = compare(*CLOSED, *flags, stand_in=server)
    assert result["slo_attainment"] == 0
    assert result["num_errors"] == 8
    assert "out of memory" in result["errors"][0]


def test_a_bad_flag_ends_with_code_2_and_one_sentence(capsys: Any) -> None:
    assert goodput.main(["--policies", "of"]) == 2
    assert "goodput.py: error:" in capsys.readouterr().err


def test_programs_take_the_place_of_shapes() -> None:
    server = StandIn()
    flags = ("--programs", "chains,chat", "--policies", "off", "--rounds", "1")
    results = compare(*CLOSED, *flags, "--goodput", "tpot:900", stand_in=server)
    (result,) = results
    assert result["num_errors"] == 0
    assert result["workload"]["programs"] == ["chains", "chat"]
    assert result["workload"]["num_requests"] == 8
    assert 0 < result["workload"]["pdr"] < 1
