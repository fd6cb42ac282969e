"""`sglang-taper simulate`: flags, sweeps, ablations, output."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from sglang_taper import cli
from sglang_taper.errors import FieldError
from sglang_taper.policy.latency import StepLatencyModel
from sglang_taper.sim.machine import Machine, make_machine, profile_names, read_machine
from sglang_taper.sim.options import SimulateOptions, add_flags
from sglang_taper.sim.predictors import ConstantPredictor, ScaledPredictor
from sglang_taper.sim.sweep import run_sweep, variants

SMALL = ("--num-prompts", "30", "--serial-tokens", "15", "--arrivals", "closed:4")


def options(*flags: str) -> SimulateOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return SimulateOptions.from_args(parser.parse_args([*SMALL, *flags]))


def results(*flags: str) -> list[dict[str, Any]]:
    return list(run_sweep(options(*flags)))


def test_policies_are_spelled_as_for_goodput() -> None:
    given = "off,cap:3,taper:deadline=progress,rho=0.8,ledger"
    assert options("--policies", given).policies == [
        *("off", "cap:3", "taper:deadline=progress:rho=0.8", "ledger")
    ]
    flags = ("--tpot-slo-ms", "80", "--policies", "cap:3,cap:cap=3,eager")
    short, long, eager = (result["token_goodput"] for result in results(*flags))
    assert short == long != eager


def test_a_policy_that_is_named_twice_is_refused() -> None:
    with pytest.raises(FieldError, match="every policy once"):
        options("--policies", "off,eager,off")


def test_a_file_that_can_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "nosuch" / "x.json")
    assert cli.main(["simulate", *SMALL, "--json", where]) == 2
    assert "--json" in capsys.readouterr().err


# -- machines


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_says_where_it_is_from_and_serves_as_latency_profile(
    name: str,
) -> None:
    machine = read_machine(name)
    assert len(machine.source) > 20
    folder = Path(cli.__file__).parent / "sim" / "profiles"
    facts = json.loads((folder / f"{name}.json").read_text())
    assert StepLatencyModel.from_profile(facts).coefficients() == machine.decode


def test_the_profiles_that_are_promised_exist() -> None:
    assert {"cpu", "h200", "tp8", "old"} <= set(profile_names())


def test_a_profile_of_a_server_is_a_machine_without_prefill_costs() -> None:
    facts = {"a_ms": 5.0, "b_ms_per_row": 1.0, "c_ms_per_token": 0.0}
    machine = make_machine(facts)
    assert machine == Machine(machine.decode)
    assert machine.prefill.duration_ms(1000) == 0.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prefill": {"a_ms": 1.0}}, "ms_per_token"),
        ({"prefill": {"a_ms": 1.0, "ms_per_token": 1.0, "b": 2}}, "b"),
        ({"prefill": {"a_ms": -1.0, "ms_per_token": 1.0}}, "a_ms"),
        ({"prefill": {"a_ms": 1.0, "ms_per_token": 1e308}}, "ms_per_token"),
        ({"prefill": {"a_ms": math.inf, "ms_per_token": 1.0}}, "a_ms"),
        ({"group_ms": math.nan}, "group_ms"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"max_kv_tokens": -5.0}, "max_kv_tokens"),
        ({"speed": 3}, "speed"),
        ({"a_ms": -1.0}, "a_ms"),
    ],
)
def test_a_bad_profile_is_refused_by_key(change: dict[str, Any], named: str) -> None:
    facts = {"a_ms": 5.0, "b_ms_per_row": 1.0, "c_ms_per_token": 0.0, **change}
    with pytest.raises(FieldError, match=named):
        make_machine(facts)


def test_an_unknown_profile_is_refused_with_the_known_names() -> None:
    with pytest.raises(FieldError, match="cpu, h200"):
        read_machine("h300")


# -- predictors


def test_a_biased_predictor_is_wrong_by_the_same_factor_everywhere() -> None:
    truth = read_machine("tp8").decode
    biased = ScaledPredictor(truth, bias=-0.2).coefficients()
    assert biased.a_ms == pytest.approx(0.8 * truth.a_ms)
    assert biased.c_ms_per_token == pytest.approx(0.8 * truth.c_ms_per_token)
    assert ScaledPredictor(truth).coefficients() == truth


def test_policies_are_told_how_wrong_a_predictor_is() -> None:
    truth = read_machine("tp8").decode
    assert ScaledPredictor(truth, bias=-0.2).coefficients().error == 0.2
    noisy = ScaledPredictor(truth, noise=0.1)
    assert noisy.coefficients().error == pytest.approx(0.08)
    assert ScaledPredictor(truth, bias=5.0).coefficients().error == 1.0


def test_a_noisy_predictor_is_right_on_average() -> None:
    truth = read_machine("tp8").decode
    noisy = ScaledPredictor(truth, noise=0.2)
    draws = [noisy.coefficients().a_ms / truth.a_ms for _ in range(2000)]
    assert sum(draws) / len(draws) == pytest.approx(1.0, abs=0.02)
    assert max(draws) > 1.3


def test_a_constant_predictor_expects_what_steps_took_so_far() -> None:
    constant = ConstantPredictor(read_machine("tp8").decode)
    constant.observe(4, 100, 10.0)
    constant.observe(40, 9000, 20.0)
    model = constant.coefficients()
    assert (model.a_ms, model.b_ms_per_row, model.c_ms_per_token) == (15.0, 0.0, 0.0)


# -- sweeps


def test_every_policy_is_run_at_every_slo_and_seed() -> None:
    found = results(
        *("--policies", "off,ledger", "--tpot-slo-ms", "80,120", "--seeds", "1,2")
    )
    runs = [(r["policy"], r["goodput_slos_ms"]["tpot"], r["seed"]) for r in found]
    assert sorted(runs) == [
        (policy, slo, seed)
        for policy in ("ledger", "off")
        for slo in (80.0, 120.0)
        for seed in (1, 2)
    ]


def test_targets_may_be_multiples_of_the_pace_under_off() -> None:
    (found,) = results("--policies", "off", "--tpot-slo-x", "1.5")
    pace_ms = found["mean_time_between_tokens_ms"]
    assert found["goodput_slos_ms"]["tpot"] == pytest.approx(1.5 * pace_ms)
    defaults = [r["goodput_slos_ms"]["tpot"] for r in results("--policies", "off")]
    expected = [factor * pace_ms for factor in (1.15, 1.3, 1.5, 2.0)]
    assert defaults == pytest.approx(expected)


def test_rho_is_swept_for_policies_that_use_it_and_do_not_name_one() -> None:
    flags = ("--policies", "off,taper,taper:rho=1,ledger", "--rho", "0.2,0.4")
    labels = [variant.label for variant in variants(options(*flags))]
    assert labels == ["off", "taper:rho=0.2", "taper:rho=0.4", "taper:rho=1", "ledger"]


def test_a_looser_target_is_never_met_less_often() -> None:
    found = results("--policies", "eager", "--tpot-slo-ms", "40,80,160")
    attained = [r["slo_attainment"] for r in found]
    assert attained == sorted(attained)


def test_ablations_take_away_one_part_at_a_time() -> None:
    flags = ("--policies", "off,taper", "--ablations")
    labels = [variant.label for variant in variants(options(*flags))]
    assert labels[:3] == ["off", "taper", "taper (no slack budget)"]
    for part in ("no replanning", "constant predictor", "bias -5%", "noise 30%"):
        assert f"taper ({part})" in labels
    assert {"taper (rho 0.1)", "taper (rho 1)"} <= set(labels)
    assert not any("off (" in label for label in labels)


def test_without_a_slack_budget_taper_is_eager() -> None:
    flags = ("--tpot-slo-ms", "60", "--ablations", "--policies", "eager,taper")
    found = {result["policy"]: result for result in results(*flags)}
    eager, ablated = found["eager"], found["taper (no slack budget)"]
    assert ablated["token_goodput"] == eager["token_goodput"]
    kept = found["taper (no replanning)"]
    assert kept["num_steps"] != found["taper"]["num_steps"]


def test_a_result_names_what_was_composed_and_what_was_simulated() -> None:
    (found,) = results("--policies", "ledger", "--tpot-slo-ms", "80")
    assert {"pdr", "pts", "abf", "parallel_duty"} <= found["workload"].keys()
    assert (found["profile"], found["params"]["policy"]) == ("cpu", "ledger")
    for key in ("p99_itl_ms", "stall_share", "mean_rows_deferred", "simulated_s"):
        assert found[key] >= 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--policies", "tapir"),
        ("--policies", "taper:rho=2"),
        ("--policies", "taper:speed=2"),
        ("--tpot-slo-ms", "fast"),
        ("--rho", "1.5"),
        ("--predictor", "oracle"),
        ("--predictor-noise", "-1"),
        ("--max-requests", "0"),
        ("--prefill-hold-s", "long"),
        ("--profile", "h300"),
        ("--seeds", "x"),
    ],
)
def test_a_bad_flag_ends_the_command_with_code_2(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *flags]) == 2
    assert flags[1].split(":")[-1].split("=")[0] in capsys.readouterr().err


def test_the_table_has_a_block_per_target_and_says_it_is_a_projection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    flags = ["--policies", "off,eager", "--tpot-slo-ms", "80,120", "--seeds", "1,2"]
    out = ["--json", str(file), "--output-details"]
    assert cli.main(["simulate", *SMALL, *flags, *out]) == 0
    shown = capsys.readouterr().out
    assert "a projection" in shown
    assert shown.count("TTFT 2000 ms") == 2
    assert [line.split()[0] for line in shown.splitlines()[3:5]] == ["off", "eager"]
    facts = json.loads(file.read_text())
    assert len(facts["results"]) == 8
    assert len(facts["results"][0]["requests"]) == 30
    assert "projection" in facts["note"]


def test_exact_cases_are_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cases.json"
    assert cli.main(["simulate", "--exact-cases", "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["cases"]
    assert {"case", "policy", "end_ms", "num_steps", "token_goodput"} <= cases[0].keys()
    assert len(capsys.readouterr().out.splitlines()) == len(cases)


def test_a_profile_without_prefill_costs_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"a_ms": 50.0, "b_ms_per_row": 1.0, "c_ms_per_token": 0.0}
    costly = {**free, "prefill": {"a_ms": 60.0, "ms_per_token": 0.5}}
    said = []
    for facts in (free, costly):
        file = tmp_path / "profile.json"
        file.write_text(json.dumps(facts))
        flags = ("--profile", str(file), "--policies", "eager", "--tpot-slo-ms", "80")
        assert cli.main(["simulate", *SMALL, *flags]) == 0
        said.append("prefills, so these take no time" in capsys.readouterr().out)
    assert said == [True, False]
