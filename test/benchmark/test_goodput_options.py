"""The command line of the goodput benchmark: presets, policies, refusals."""

from __future__ import annotations

import math

import pytest
from goodput_lib.fitting import fitted
from goodput_lib.options import Options
from goodput_lib.policies import parse_policies
from goodput_lib.presets import PRESETS

from sglang_taper.changes import updated_params
from sglang_taper.errors import FieldError
from sglang_taper.policy.types import PolicyParams
from sglang_taper.workload.requests import (
    PlannedRequest,
    make_requests,
    workload_header,
)
from sglang_taper.workload.shape import make_shape


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_alone_is_a_whole_comparison(name: str) -> None:
    options = Options.from_argv(["--preset", name])
    labels = [contender.label for contender in options.policies]
    assert {"off", "eager", "ledger"} <= set(labels)
    assert options.slos_ms["ttft"] > 0
    assert options.args.slo_procedure
    assert "--max-running-requests" in options.server_flags
    header = workload_header(options.spec(0, 1.0), make_requests(options.spec(0, 1.0)))
    assert 0 < header["pdr"] <= 1
    for contender in options.policies:
        if not contender.is_stock:
            updated_params(PolicyParams(), contender.changes)


def test_what_is_given_wins_over_the_preset() -> None:
    given = ["--rounds", "1", "--policies", "off,cap:3", "--goodput", "tpot:40"]
    options = Options.from_argv(["--preset", "cpu-contested", *given])
    assert options.args.rounds == 1
    assert [contender.label for contender in options.policies] == ["off", "cap:3"]
    assert options.slos_ms == {"tpot": 40}
    assert options.args.arrivals == "closed:8"


def test_parameters_of_a_policy_may_follow_commas() -> None:
    one, cap, other = parse_policies("taper:deadline=progress,rho=0.8,cap:2,ledger")
    assert one.changes == {"policy": "taper", "deadline": "progress", "rho": 0.8}
    assert (cap.changes, cap.label) == ({"policy": "cap", "cap": 2}, "cap:2")
    assert other.changes == {"policy": "ledger"}


def test_policies_that_ignore_slos_are_known_as_such() -> None:
    contenders = parse_policies("off,eager,cap:2,stock,taper,ledger")
    blind = [contender.label for contender in contenders if contender.is_slo_blind]
    assert blind == ["off", "eager", "cap:2", "stock"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--policies", "off,off"], "--policies"),
        (["--policies", "of"], "of"),
        (["--policies", "taper:rho=2"], "rho"),
        (["--goodput", "ttft:100"], "--goodput"),
        (["--goodput", "tpot:50", "--rounds", "0"], "--rounds"),
        (["--goodput", "tpot:50", "--arrivals", "poisson"], "--arrivals"),
        (["--goodput", "tpot:50", "--request-rates", "2,1"], "--request-rates"),
        (["--goodput", "tpot:50", "--request-rates", "1,2"], "--arrivals"),
        (["--goodput", "tpot:50", "--rate-x", "1"], "--rate-x"),
        (["--goodput", "tpot:50", "--num-prompts", "8"], "--num-prompts"),
        (["--goodput", "tpot:50", "--clip-prompt", "9-3"], "--clip-prompt"),
        (["--goodput", "tpot:50", "--planned-share", "1.5"], "--planned-share"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(FieldError, match=named):
        Options.from_argv(flags)


def test_every_round_has_requests_of_its_own() -> None:
    options = Options.from_argv(["--preset", "cpu-contested"])
    first, again, second = (
        [request.shape for request in make_requests(options.spec(round_))]
        for round_ in (0, 0, 1)
    )
    assert first == again
    assert first != second


def test_prompts_are_kept_within_limits_and_the_share_is_told() -> None:
    options = Options.from_argv(["--preset", "cpu-vs-stock"])
    found = fitted(make_requests(options.spec(0)), options.clip_prompt, math.inf)
    lengths = [request.shape.prompt_tokens for request in found.requests]
    assert 1024 <= min(lengths) <= max(lengths) <= 4096
    assert 0 < found.share_clipped < 1
    assert found.share_dropped == 0


def test_what_does_not_fit_the_server_is_left_out_and_the_share_is_told() -> None:
    shapes = [make_shape(10, [5]), make_shape(10, [2, [[5], [6]], 2])]
    requests = [PlannedRequest(0.0, shape) for shape in shapes]
    found = fitted(requests, (1, 100), 24)
    assert [request.shape for request in found.requests] == shapes[:1]
    assert (found.share_clipped, found.share_dropped) == (0.0, 0.5)
    with pytest.raises(FieldError, match="--max-request-tokens"):
        fitted(requests, (1, 100), 14)
