"""Tables, other SLOs after the fact, and figures of what a comparison wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report
from goodput_lib import figures
from goodput_lib.rescoring import goodput_over_tpot, rescored
from goodput_lib.tables import markdown_tables, rates_attained

from sglang_taper.errors import FieldError
from sglang_taper.workload.score import Outcome, score

SLOS = {"ttft": 500.0, "tpot": 50.0}


def outcomes_at(tpot_ms: float) -> list[Outcome]:
    """Ten requests of eleven tokens; the last two take twice as long."""
    spans = [tpot_ms] * 8 + [2 * tpot_ms] * 2
    return [Outcome(0.0, 100.0, 100 + 10 * ms, 11, 11, False) for ms in spans]


def result(
    policy: str, round_: int = 0, tpot_ms: float = 40.0, rate: float | None = None
) -> dict[str, Any]:
    outcomes = outcomes_at(tpot_ms)
    itls = {f"{name}_itl_ms": tpot_ms for name in ("mean", "p99", "max")}
    return {
        "policy": policy,
        "run": f"{policy} {round_} {rate}",
        "round": round_,
        "tpot_slo_x": None,
        "request_rate": rate,
        "test_switch": None,
        **score(outcomes, SLOS, 1.0),
        **itls,
        "engine": {"rows_over_time": [1.0, 2.0], "step_pairs_ms": [[10.0, 11.0]]},
        "requests": msgspec.to_builtins(outcomes),
        "server": {
            "arguments": {"model_path": "m"},
            "weights": "random",
            "sglang": "0",
        },
        "machine": {"cpus": 2},
        "workload": {
            **dict.fromkeys(("pdr", "pts", "abf", "parallel_duty"), 0.5),
            **dict.fromkeys(("num_requests", "seed", "output_tokens"), 1),
            "share_clipped": 0.0,
        },
    }


def test_the_table_has_means_spread_and_ratios() -> None:
    results = [result("off", 0, 40.0), result("off", 1, 20.0), result("eager", 0, 60.0)]
    lines = markdown_tables(results).splitlines()
    off, eager = (line.split(" | ") for line in lines if line.startswith("| `"))
    # 8 of 10 requests at 40 and all at 20 ms are within 50 ms; none at 60.
    assert off[:3] == ["| `off`", "99.0 (88.0-110.0)", "1.00"]
    assert off[4] == "90% (80%-100%)"
    assert eager[1:3] == ["0.0", "0.00"]


@pytest.mark.parametrize(("itl_ms", "verdict"), [(49, "Not contested"), (51, "Cont")])
def test_the_table_says_whether_width_can_matter(itl_ms: float, verdict: str) -> None:
    tables = markdown_tables([result("off"), result("eager", tpot_ms=itl_ms)])
    assert f"\n\n{verdict}" in tables
    assert f"a token every {itl_ms} ms" in tables


def test_results_at_other_slos_are_in_another_table() -> None:
    other = {**result("off"), "goodput_slos_ms": {"tpot": 10.0}}
    assert markdown_tables([result("off"), other]).count("| policy |") == 2


def test_a_test_switch_stands_in_the_title() -> None:
    slowed = {**result("off"), "test_switch": "9 ms added to every decode step"}
    assert "TEST SWITCH: 9 ms added" in markdown_tables([slowed])


def test_weights_that_are_not_real_are_named(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(result("off")) + "\n")
    assert report.main([str(file)]) == 0
    assert "random weights" in capsys.readouterr().out


def test_rates_are_those_of_the_last_rate_of_each_round() -> None:
    results = [
        {**result("off", 0, rate=1.0), "rate_at_attainment": 1.0},
        {**result("off", 0, rate=2.0), "rate_at_attainment": 1.6},
        {**result("off", 1, rate=1.0), "rate_at_attainment": None},
    ]
    (policies,) = rates_attained(results).values()
    assert policies == {"off": [1.6, 0.0]}


def test_rescoring_is_as_good_as_having_had_that_slo_at_once() -> None:
    (again,) = rescored([result("eager", tpot_ms=40.0)], {"tpot": 90.0})
    assert again["slo_attainment"] == 1.0
    assert again["token_goodput"] == 110.0


def test_policies_that_look_at_their_slo_are_not_rescored() -> None:
    found = rescored([result("eager"), result("ledger")], {"tpot": 90.0})
    assert [one["policy"] for one in found] == ["eager"]


def test_a_run_that_was_scored_at_several_slos_is_rescored_once() -> None:
    assert len(rescored([result("off"), result("off")], {"tpot": 9.0})) == 1


def test_rescoring_needs_the_requests() -> None:
    bare = result("off")
    del bare["requests"]
    with pytest.raises(FieldError, match="--output-details"):
        rescored([bare], {"tpot": 9.0})


def test_the_line_over_slos_rises_from_nothing_to_everything() -> None:
    line = goodput_over_tpot([result("off")])
    assert line is not None
    targets, goodputs = line
    assert goodputs == sorted(goodputs)
    assert (goodputs[0], goodputs[-1]) == (0.0, 110.0)
    assert targets[0] < 40 < 80 < targets[-1]


def test_figures_without_matplotlib_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(figures.NoMatplotlib, match=r"sglang-taper\[bench\]"):
        figures.draw_all([result("off")], tmp_path)


def test_every_figure_is_drawn_from_results_that_have_its_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [result("off"), result("ledger"), result("off", rate=1.0)]
    written = figures.draw_all(results, tmp_path)
    assert [path.stem for path in written] == list(figures.FIGURES)
    assert all(path.stat().st_size > 5000 for path in written)


def test_another_file_is_refused(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"a": 1}\n')
    assert report.main([str(file)]) == 2
    assert "benchmark/goodput.py" in capsys.readouterr().err
