"""Requests against SLOs, under SGLang's names."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.benchmark.goodput import GOODPUT_SLO_METRICS, GoodputMetrics

from sglang_taper.errors import FieldError
from sglang_taper.workload.score import (
    SLO_METRICS,
    Outcome,
    parse_slos,
    percentile,
    score,
)

SLOS = {"ttft": 100.0, "tpot": 20.0}


def outcome(**changes: Any) -> Outcome:
    """11 tokens in 200 ms after a first one at 50: just in time."""
    facts = {
        "sent_ms": 0.0,
        "first_token_ms": 50.0,
        "ended_ms": 250.0,
        "num_tokens": 11,
        "num_critical_tokens": 11,
        "is_decomposable": False,
    }
    return Outcome(**(facts | changes))


def test_a_request_meets_its_slos_up_to_the_limit() -> None:
    assert outcome().meets(SLOS)
    assert not outcome(ended_ms=250.1).meets(SLOS)
    assert not outcome(sent_ms=-50.1).meets(SLOS)
    assert not outcome().meets(SLOS | {"e2el": 249.0})


def test_width_counts_for_all_tokens_and_not_on_the_critical_path() -> None:
    wide = outcome(num_tokens=31, num_critical_tokens=6)
    assert (wide.tpot_ms, wide.tpot_critical_ms) == (200 / 30, 40.0)
    assert wide.meets(SLOS)
    assert not wide.meets(SLOS, critical=True)


def test_a_single_token_has_no_time_between_tokens() -> None:
    assert outcome(num_tokens=1, ended_ms=50.0).tpot_ms == 0.0


def test_failures_are_misses_and_count_as_sent() -> None:
    failed = outcome(ended_ms=None)
    facts = score([outcome(), failed], SLOS, duration_s=2.0)
    assert (facts["sent"], facts["completed"], facts["failed"]) == (2, 1, 1)
    assert facts["slo_attainment"] == 0.5
    assert facts["slo_attainment_by_metric"] == {"ttft": 0.5, "tpot": 0.5}
    assert (facts["request_goodput"], facts["token_goodput"]) == (0.5, 5.5)


def test_tokens_of_requests_that_miss_are_output_but_not_goodput() -> None:
    late = outcome(ended_ms=900.0, num_tokens=9)
    facts = score([outcome(), late], SLOS, duration_s=1.0)
    assert (facts["output_throughput"], facts["token_goodput"]) == (20.0, 11.0)


def test_serial_forking_and_victim_requests_are_told_apart() -> None:
    outcomes = [
        outcome(),
        outcome(is_victim=True, ended_ms=900.0),
        outcome(is_decomposable=True, makespans_ms=(70.0, 90.0)),
    ]
    facts = score(outcomes, SLOS, duration_s=1.0)
    assert (facts["serial_sent"], facts["serial_slo_attainment"]) == (2, 0.5)
    assert facts["decomposable_slo_attainment"] == 1.0
    assert (facts["victim_sent"], facts["victim_slo_attainment"]) == (1, 0.0)
    assert facts["victim_mean_tpot_ms"] == 85.0
    assert facts["mean_makespan_ms"] == 80.0


def test_an_empty_window_has_no_shares() -> None:
    facts = score([], SLOS, duration_s=0.0)
    assert (facts["slo_attainment"], facts["token_goodput"]) == (0.0, 0.0)
    assert facts["serial_slo_attainment"] is None
    assert facts["mean_tpot_ms"] is None


def test_keys_and_metrics_are_those_of_sglang() -> None:
    facts = score([outcome()], SLOS, duration_s=1.0)
    assert set(GoodputMetrics.__struct_fields__) <= facts.keys()
    assert SLO_METRICS == GOODPUT_SLO_METRICS


def test_slos_are_written_as_sglang_takes_them() -> None:
    assert parse_slos(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}


@pytest.mark.parametrize("pair", ["itl:5", "tpot", "tpot:x", "tpot:0", "tpot:nan"])
def test_other_slos_are_refused(pair: str) -> None:
    with pytest.raises(FieldError, match="--goodput"):
        parse_slos([pair])


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0], 100) == 2.0
    assert percentile([], 50) is None
