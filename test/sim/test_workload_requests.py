"""Arrivals, whole workloads, and the flags that describe them."""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from sglang_taper.errors import FieldError
from sglang_taper.workload.arrivals import (
    Arrivals,
    arrival_times_ms,
    parse_arrivals,
    read_trace,
)
from sglang_taper.workload.flags import add_flags, spec_from
from sglang_taper.workload.requests import WorkloadSpec, make_requests, workload_header

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:46.9305900,396,109\r\n"
    "2023-11-16 18:15:50.6805900,10,20"
)


def azure_file(tmp_path: Path) -> str:
    file = tmp_path / "azure.csv"
    file.write_bytes(AZURE.encode())
    return str(file)


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("poisson", Arrivals()),
        ("gamma:2.5", Arrivals(cv=2.5)),
        ("trace:a:b.csv", Arrivals(trace="a:b.csv")),
        ("closed:6", Arrivals(concurrency=6)),
    ],
)
def test_arrivals_are_named_on_the_command_line(text: str, arrivals: Arrivals) -> None:
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize(
    "text", ["", "uniform", "gamma", "gamma:0", "gamma:nan", "closed:0", "trace:"]
)
def test_other_arrivals_are_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(FieldError, match="poisson, gamma:CV"):
        parse_arrivals(text)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_drawn_gaps_have_the_rate_and_variation_asked_for(cv: float) -> None:
    times = arrival_times_ms(Arrivals(cv=cv), 20_000, random.Random(3), 4.0)
    gaps = [after - before for before, after in pairwise(times)]
    assert fmean(gaps) == pytest.approx(250, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_slowing_down_stretches_time() -> None:
    usual = arrival_times_ms(Arrivals(), 50, random.Random(3), 4.0)
    slow = arrival_times_ms(Arrivals(), 50, random.Random(3), 4.0, slowdown=3.0)
    assert slow == pytest.approx([3 * at_ms for at_ms in usual])


def test_an_azure_trace_keeps_its_gaps_and_counts(tmp_path: Path) -> None:
    rows = read_trace(azure_file(tmp_path), random.Random(0))
    assert [row.arrival_ms for row in rows] == pytest.approx([0, 250, 4000])
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [
        (374, 44),
        (396, 109),
        (10, 20),
    ]


def test_a_trace_is_scaled_to_a_rate_and_keeps_its_bursts(tmp_path: Path) -> None:
    arrivals = Arrivals(trace=azure_file(tmp_path))
    times = arrival_times_ms(arrivals, 3, random.Random(0), rate_per_s=1.0)
    assert times == pytest.approx([0, 125, 2000])


def test_a_mooncake_trace_gets_its_rounding_undone(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 3000, "input_length": 7, "output_length": 5, "hash_ids": []}
    file.write_text("\n".join([json.dumps(row)] * 400))
    times = [row.arrival_ms for row in read_trace(str(file), random.Random(0))]
    assert times == sorted(times)
    assert 2800 < times[-1] < 3000
    assert len(set(times)) == 400


def test_a_trace_that_is_too_short_or_none_is_refused(tmp_path: Path) -> None:
    arrivals = Arrivals(trace=azure_file(tmp_path))
    with pytest.raises(FieldError, match="at least 4 requests"):
        arrival_times_ms(arrivals, 4, random.Random(0))
    with pytest.raises(FieldError, match="Azure CSV or Mooncake"):
        read_trace(str(tmp_path), random.Random(0))


def test_an_open_loop_without_a_rate_is_refused() -> None:
    with pytest.raises(FieldError, match="--request-rate"):
        arrival_times_ms(Arrivals(), 4, random.Random(0))


def test_a_seed_gives_the_same_requests_and_shapes_do_not_follow_arrivals() -> None:
    spec = WorkloadSpec(num_requests=30, seed=4)
    assert make_requests(spec) == make_requests(spec)
    other = WorkloadSpec(30, 4, Arrivals(), rate_per_s=2.0)
    shapes = [request.shape for request in make_requests(other)]
    assert shapes == [request.shape for request in make_requests(spec)]
    assert make_requests(WorkloadSpec(30, 5)) != make_requests(spec)


def parsed(*flags: str) -> WorkloadSpec:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return spec_from(parser.parse_args(flags), seed=9)


def test_flags_describe_a_workload() -> None:
    spec = parsed("--arrivals", "poisson", "--request-rate", "3", "--fan-out", "4-6")
    assert (spec.seed, spec.rate_per_s, spec.params.fan_out) == (9, 3.0, (4, 6))
    assert parsed("--stages", "2").params.stages == (2, 2)
    assert parsed() == WorkloadSpec(seed=9)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--pdr", "much"),
        ("--fan-out", "4-x"),
        ("--shorten", "0"),
        ("--num-prompts", "0"),
    ],
)
def test_a_bad_flag_is_named(flag: str, value: str) -> None:
    with pytest.raises(FieldError, match=flag):
        parsed(flag, value)


def test_real_trees_are_mixed_with_serial_requests_when_a_share_is_given(
    tmp_path: Path,
) -> None:
    tree = (
        {"serial": 5},
        {"fork": {"header": 1, "branches": [[tree_of(3)]] * 2, "join": 1}},
    )
    file = tmp_path / "trees.jsonl"
    file.write_text(json.dumps({"prompt_tokens": 8, "phases": tree}))
    spec = parsed("--fork-trees", str(file), "--pdr", "0.3", "--num-prompts", "300")
    header = workload_header(spec, make_requests(spec))
    assert header["pdr"] == pytest.approx(0.3, abs=0.06)
    assert header["fork_trees"] == str(file)
    assert header["parameters"]["serial_tokens"] == 200.0
    unmixed = parsed("--fork-trees", str(file), "--num-prompts", "20")
    header = workload_header(unmixed, make_requests(unmixed))
    assert (header["pdr"], header["parameters"]) == (1.0, None)


def tree_of(tokens: int) -> dict[str, int]:
    return {"serial": tokens}
