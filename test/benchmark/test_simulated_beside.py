"""Real results beside simulated ones of the same requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import simulated_beside as beside

from sglang_taper.errors import FieldError
from sglang_taper.sim.machine import Prefill, make_machine
from sglang_taper.sim.run import Handicap, result_of, simulate
from sglang_taper.workload.arrivals import Arrivals
from sglang_taper.workload.parametric import ShapeParams
from sglang_taper.workload.requests import (
    WorkloadSpec,
    make_requests,
    workload_header,
)

MODEL = {"a_ms": 60.0, "b_ms_per_row": 5.0, "c_ms_per_token": 0.01}
SLOS = {"ttft": 3000.0, "tpot": 150.0}
SPEC = WorkloadSpec(
    num_requests=40,
    seed=3,
    arrivals=Arrivals(concurrency=6),
    params=ShapeParams(prompt_tokens=24, serial_tokens=30),
)


def real_result(policy: str = "eager", **changes: Any) -> dict[str, Any]:
    """What goodput.py would write of a server that behaves as the simulator does."""
    requests = make_requests(SPEC)
    facts = {"policy": policy, **changes}
    result: dict[str, Any] = {
        "policy": policy,
        "params": facts,
        "goodput_slos_ms": SLOS,
        "planned_slos_ms": SLOS,
        "token_goodput": 1.0,
        "slo_attainment": 1.0,
        "engine": {"latency_model": MODEL},
        "workload": {
            **workload_header(SPEC, requests),
            "prompt_limits": [1, 1_000_000],
            "share_dropped": 0.0,
        },
        "server": {
            "max_total_num_tokens": 8192,
            "arguments": {
                "chunked_prefill_size": 2048,
                "max_running_requests": 64,
                "disable_overlap_schedule": False,
            },
        },
    }
    return json.loads(json.dumps(result))


def machine() -> Any:
    return beside.machine_of(MODEL, Prefill(65.0, 3.0), real_result())


def test_the_workload_is_made_again_from_the_header() -> None:
    assert beside.spec_of(real_result()["workload"]) == SPEC
    assert make_requests(beside.spec_of(real_result()["workload"])) == make_requests(
        SPEC
    )


def test_the_machine_is_that_of_the_run() -> None:
    made = machine()
    decode = make_machine({**MODEL, "shared_read_once": True}).decode
    assert made.decode == decode
    assert made.prefill.duration_ms(10) == 95
    assert (made.max_kv_tokens, made.chunk_tokens) == (8192, 2048)


@pytest.mark.parametrize("policy", ["off", "eager", "taper"])
def test_a_run_is_played_with_its_policy_and_slos(policy: str) -> None:
    played = beside.simulated(real_result(policy), machine())
    params = msgspec.structs.replace(
        beside.PolicyParams(policy=policy),
        ttft_slo_ms=SLOS["ttft"],
        tpot_slo_ms=SLOS["tpot"],
    )
    engine = beside.EngineOptions(max_rows=64, joins="tree", late_results=True)
    own = simulate(make_requests(SPEC), params, machine(), engine, Handicap(), 6, 3)
    assert played == result_of(own, SLOS)


def test_prompts_are_clipped_as_they_were() -> None:
    short = real_result()
    short["workload"]["prompt_limits"] = [1, 8]
    faster, slower = (
        beside.simulated(result, machine())["output_throughput"]
        for result in (short, real_result())
    )
    assert faster > slower


def test_prefills_cost_what_they_took_in_the_run_unless_told() -> None:
    silent, measured = real_result(), real_result()
    measured["engine"]["prefill_ms"] = [20.0, 0.5]
    assert beside.prefill_of(measured) == Prefill(20.0, 0.5)
    costs = [(MODEL, Prefill(20.0, 0.5)), (MODEL, Prefill(40.0, 1.5))]
    assert beside.mean_costs(costs) == (MODEL, Prefill(30.0, 1.0))
    with pytest.raises(FieldError, match="--prefill-ms"):
        beside.prefill_of({**silent, "run": "r1"})


def test_policies_differ_in_what_is_played() -> None:
    goodputs = {
        policy: beside.simulated(real_result(policy), machine())["token_goodput"]
        for policy in ("off", "eager", "taper")
    }
    assert len(set(goodputs.values())) == 3


def test_the_table_says_how_far_apart_they_are() -> None:
    real = {**real_result(), "token_goodput": 40.0, "slo_attainment": 0.9}
    played = {"token_goodput": 44.0, "slo_attainment": 0.95}
    last = beside.table([(real, played), (real, played)]).splitlines()[-1]
    assert last == "| `eager` | 150 | 40.0 | 44.0 | 1.10 | 90% | 95% | +5 |"


def test_results_that_can_not_be_played_are_left_out_or_refused(tmp_path: Path) -> None:
    stock = {**real_result(), "engine": None}
    others = [real_result() for _ in range(3)]
    others[0]["workload"]["parameters"] = None
    others[1]["workload"]["fork_trees"] = "trees.jsonl"
    others[2]["workload"]["share_dropped"] = 0.1
    assert beside.comparable([stock, real_result(), *others]) == [real_result()]
    with pytest.raises(FieldError):
        beside.comparable([stock])
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(stock) + "\n")
    assert beside.main([str(file), "--prefill-ms", "1,2"]) == 2


@pytest.mark.parametrize("text", ["", "1", "a,b", "1,2,3", "-1,2", "1,nan"])
def test_a_prefill_cost_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(FieldError, match="--prefill-ms"):
        beside.parse_prefill(text)


def test_a_file_becomes_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(real_result(p)) + "\n" for p in ("off", "cap")))
    assert beside.main([str(file), "--prefill-ms", "65,3", "--one-model"]) == 0
    assert [line[:8] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "| `off` ",
        "| `cap` ",
    ]
