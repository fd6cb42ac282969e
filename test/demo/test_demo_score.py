from __future__ import annotations

import pytest
from demo_factories import a_record

from sglang_taper.demo.score import (
    BranchSteps,
    Slo,
    describe,
    mean_serial_tpot_ms,
    mean_width,
    score,
)

SLO = Slo(ttft_ms=1000, tpot_ms=60)
SLOW_S = 0.061


def test_tpot_is_read_over_all_tokens_and_over_the_longest_branch() -> None:
    record = a_record(forked=True, tpot_s=0.01, branch_tokens=(21, 10, 10))
    assert record.tpot_ms == pytest.approx(10)
    assert record.tpot_critical_ms == pytest.approx(10 * 40 / 20)


def test_a_single_token_has_no_tpot() -> None:
    assert a_record(branch_tokens=(1,)).tpot_ms == 0


def test_a_request_is_good_when_both_targets_are_met() -> None:
    assert SLO.is_met(a_record())
    assert not SLO.is_met(a_record(tpot_s=SLOW_S))
    assert not SLO.is_met(a_record(ttft_s=1.001))


def test_the_server_plans_with_a_slightly_tighter_target() -> None:
    assert 0.9 * SLO.tpot_ms < SLO.planned_tpot_ms < SLO.tpot_ms


def test_a_wide_request_can_be_good_and_late_on_its_critical_path() -> None:
    record = a_record(forked=True, tpot_s=0.02, branch_tokens=(20, 20, 20, 20))
    assert SLO.is_met(record)
    assert not SLO.is_met_critical(record)


def test_attainment_counts_requests_and_goodput_the_tokens_of_good_ones() -> None:
    records = [
        a_record(branch_tokens=(50,)),
        a_record(branch_tokens=(30,), tpot_s=SLOW_S),
        a_record(forked=True, branch_tokens=(10, 10), tpot_s=0.04),
    ]
    facts = score(records, SLO, duration_s=10)
    assert (facts["num_requests"], facts["num_good"]) == (3, 2)
    assert (facts["num_serial"], facts["num_serial_good"]) == (2, 1)
    assert facts["slo_attainment"] == pytest.approx(2 / 3)
    assert facts["slo_attainment_critical"] == pytest.approx(1 / 3)
    assert facts["request_goodput"] == pytest.approx(0.2)
    assert facts["token_goodput"] == pytest.approx(7)
    assert facts["output_throughput"] == pytest.approx(10)


def test_serial_and_forked_requests_are_reported_apart() -> None:
    records = [
        a_record(tpot_s=0.05),
        a_record(tpot_s=0.07),
        a_record(forked=True, tpot_s=0.02, branch_tokens=(11, 11)),
    ]
    facts = score(records, SLO, duration_s=1)
    assert facts["serial_tpot_ms"] == pytest.approx({"mean": 60, "max": 70})
    assert facts["forked_tpot_ms"] == pytest.approx({"mean": 20, "max": 20})
    assert facts["forked_tpot_critical_ms"] == pytest.approx({"mean": 42, "max": 42})
    assert mean_serial_tpot_ms(records) == pytest.approx(60)


def test_a_kind_that_was_not_sent_has_no_figures() -> None:
    facts = score([a_record()], SLO, duration_s=1)
    assert facts["forked_tpot_ms"] is None
    assert facts["mean_width"] is None


@pytest.mark.parametrize(
    ("steps", "width"),
    [
        # eager: everybody in every step
        ([(10, 0), (10, 0), (10, 0)], 3.0),
        # off: one at a time, in turn
        ([(10, 20), (10, 20), (10, 20)], 1.0),
        # two of four
        ([(10, 10)] * 4, 2.0),
        # the longest runs 10 more steps when its sibling has ended
        ([(10, 0), (20, 0)], 2.0),
    ],
)
def test_mean_width_is_over_the_steps_with_several_branches(
    steps: list[tuple[int, int]], width: float
) -> None:
    branches = [BranchSteps(run, deferred) for run, deferred in steps]
    assert mean_width([branches]) == pytest.approx(width)


def test_a_request_without_siblings_has_no_width() -> None:
    assert mean_width([[BranchSteps(5, 0)], []]) is None


def test_a_record_is_described_by_both_readings_and_its_branches() -> None:
    record = a_record(
        forked=True, branch_tokens=(2, 2), branches=(BranchSteps(1, 0),) * 2
    )
    described = describe(record, SLO)
    assert described["tpot_critical"] > described["tpot"] > 0
    assert described["branches"] == [{"run": 1, "deferred": 0}] * 2
    assert described["is_good"] is True
