from __future__ import annotations

import io

import pytest
from demo_factories import a_record, a_state, a_step
from rich.console import Console

from sglang_taper.demo.compare import Run, policy_facts, verdict
from sglang_taper.demo.score import Slo
from sglang_taper.demo.steps import StepLog
from sglang_taper.demo.table import (
    plain_table,
    policy_rows,
    print_table,
    sparkline,
)

SLO = Slo(ttft_ms=1000, tpot_ms=60)


def facts_of(policy: str, tpots_s: tuple[float, ...] = (0.05, 0.05)) -> dict:
    log = StepLog()
    log.add(a_state([]))
    log.add(a_state([a_step(1)], num_rows_deferred=12, num_predicted_steps=1))
    records = [a_record(tpot_s=tpot_s) for tpot_s in tpots_s]
    return policy_facts([Run(policy, records, log, 2.0)], SLO)


def policies(eager: tuple[float, ...], taper: tuple[float, ...]) -> dict:
    return {
        "off": facts_of("off"),
        "eager": facts_of("eager", eager),
        "taper": facts_of("taper", taper),
    }


def test_policies_stand_next_to_each_other() -> None:
    shown = policies(eager=(0.05, 0.09), taper=(0.05, 0.05))
    rows = dict(policy_rows(shown))
    assert rows["serial requests within SLO"] == ["2 of 2", "1 of 2", "2 of 2"]
    assert rows["serial TPOT mean / worst ms"] == ["50 / 50", "70 / 90", "50 / 50"]
    assert rows["rows deferred"] == ["12", "12", "12"]
    assert rows["step predicted / measured ms"][0] == "40.0 / 50.0"
    assert rows["step prediction error (MAPE)"][0] == "0.0 %"
    assert rows["mean width of a fork"] == ["-", "-", "-"]


def test_rounds_of_a_policy_are_one_column() -> None:
    log = StepLog()
    log.add(a_state([]))
    runs = [Run("off", [a_record()], log, 2.0), Run("off", [a_record()], log, 3.0)]
    facts = policy_facts(runs, SLO)
    assert (facts["num_rounds"], facts["num_requests"]) == (2, 2)
    assert facts["duration_s"] == 5.0


def test_plain_columns_are_aligned() -> None:
    text = plain_table("Title", ("", "off"), [("a", ["1"]), ("longer", ["1000"])])
    title, rule, header, _, first, second, _ = text.split("\n")[1:]
    assert title == "Title"
    assert set(rule) == {"-"}
    assert len(header) == len(first) == len(second) == len(rule)


def test_a_file_gets_no_control_characters() -> None:
    out = io.StringIO()
    print_table(Console(file=out), "Title", ("", "off"), [("a", ["1"])])
    assert out.getvalue().isascii()
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_the_same_cells() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    print_table(console, "Title", ("", "off"), [("a fact", ["42"])])
    assert "a fact" in out.getvalue()
    assert "42" in out.getvalue()


@pytest.mark.parametrize(
    ("values", "bars"),
    [([0, 4, 8], "▁▅█"), ([3, 3], "██"), ([0, 0], "▁▁"), ([], "-")],
)
def test_a_sparkline_starts_at_zero(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_the_verdict_says_that_eager_missed_what_taper_kept() -> None:
    said = verdict(policies(eager=(0.09, 0.05), taper=(0.05, 0.05)))
    assert said.startswith("eager missed the SLO of serial requests (kept it for 1 of")
    assert "taper kept it (for 2 of 2)" in said


def test_the_verdict_admits_that_nothing_was_contended() -> None:
    said = verdict(policies(eager=(0.05, 0.05), taper=(0.05, 0.05)))
    assert said.startswith("No contention at this load")


@pytest.mark.parametrize("eager", [(0.05, 0.05), (0.09, 0.09)])
def test_the_verdict_admits_that_taper_missed(eager: tuple[float, ...]) -> None:
    said = verdict(policies(eager=eager, taper=(0.09, 0.05)))
    assert said.startswith("taper did not keep the SLO of serial requests")
    assert "1 of 2" in said
