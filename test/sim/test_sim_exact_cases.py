"""The simulator against an independent one, to the last digit."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_taper.sim.cases import run_exact_cases

PROGRESS, SCHEDULE = "deadline=progress", "deadline=schedule"

# policy: ends, first token of the last request, met, met on the critical path, steps
FIVE = {
    "off": (
        (105, 173, 64, 129, 92),
        49,
        "11011",
        "10001",
        "P17:3 P26:1 D40:4 P49:1 D64:5 D78:4 D92:4 D105:3 D117:2 D129:2 D140:1 "
        "D151:1 D162:1 D173:1",
    ),
    "eager": (
        (110, 143, 69, 84, 98),
        51,
        "01011",
        "01001",
        "P17:3 P26:1 D42:6 P51:1 D69:8 D84:5 D98:4 D110:2 D121:1 D132:1 D143:1",
    ),
    "cap:cap=2": (
        (110, 143, 67, 98, 98),
        50,
        "01011",
        "01001",
        "P17:3 P26:1 D41:5 P50:1 D67:7 D83:6 D98:5 D110:2 D121:1 D132:1 D143:1",
    ),
    f"taper-paper:rho=1:{PROGRESS}": (
        (109, 153, 64, 109, 96),
        49,
        "01011",
        "01001",
        "P17:3 P26:1 D40:4 P49:1 D64:5 D81:7 D96:5 D109:3 D120:1 D131:1 D142:1 D153:1",
    ),
    f"taper-paper:rho=0.5:{PROGRESS}": (
        (109, 153, 64, 109, 96),
        49,
        "01011",
        "01001",
        "P17:3 P26:1 D40:4 P49:1 D64:5 D80:6 D96:6 D109:3 D120:1 D131:1 D142:1 D153:1",
    ),
    f"taper-paper:rho=1:{SCHEDULE}": (
        (107, 163, 64, 119, 92),
        49,
        "11011",
        "10001",
        "P17:3 P26:1 D40:4 P49:1 D64:5 D78:4 D92:4 D107:5 D119:2 D130:1 D141:1 "
        "D152:1 D163:1",
    ),
}
# Tokens per ms, as rounded by the other implementation.
FIVE_GOODPUT = {
    "off": (".1734", ".0578"),
    "eager": (".1678", ".1119"),
    "cap:cap=2": (".1678", ".1119"),
    f"taper-paper:rho=1:{PROGRESS}": (".1569", ".1046"),
    f"taper-paper:rho=0.5:{PROGRESS}": (".1569", ".1046"),
    f"taper-paper:rho=1:{SCHEDULE}": (".1840", ".0613"),
}
SMALL = {
    "context": "P120:1 D251:1 D415:2 D581:2 D715:1 D852:1",
    "dedup": "P120:1 D251:1 D398:2 D547:2 D681:1 D818:1",
    "slots": "P15:1 D26:1 D37:1 P52:1 D63:1",
    "kv": "P15:1 D26:1 D37:1 P52:1 D63:1",
    "chunk": "P13:0 P26:1 P35:1 D47:2 D58:1",
    "nested": "P10:1 D21:1 D33:2 D46:3 D58:2 D70:2 D81:1 D92:1",
}
# end, steps, prefill ms, TTFT met, met, met critical, good tokens, critical good tokens
MEDIUM = {
    "off": (170258, 882, 15470, 67, 32, 19, 2277, 726),
    "eager": (136348, 539, 15860, 200, 104, 11, 13076, 907),
    "cap:cap=2": (144288, 619, 15800, 200, 109, 11, 13303, 489),
    f"taper-paper:rho=0.5:{PROGRESS}": (158728, 767, 15440, 95, 43, 22, 4203, 915),
    f"taper-paper:rho=0.5:{SCHEDULE}": (157128, 751, 15440, 96, 45, 28, 3397, 1250),
}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], dict[str, Any]]:
    return {(case["case"], case["policy"]): case for case in run_exact_cases()}


def flags(text: str) -> list[bool]:
    return [character == "1" for character in text]


def test_every_case_and_policy_of_the_table_is_run(
    found: dict[tuple[str, str], dict[str, Any]],
) -> None:
    wanted = {("five", policy) for policy in FIVE}
    wanted |= {("medium", policy) for policy in MEDIUM}
    assert wanted | {(case, SMALL_POLICY[case]) for case in SMALL} == set(found)


SMALL_POLICY = {
    "context": "eager",
    "dedup": "eager",
    "nested": "eager",
    "slots": "off",
    "kv": "off",
    "chunk": "off",
}


@pytest.mark.parametrize("policy", FIVE)
def test_five_requests_end_when_the_other_implementation_says(
    found: dict[tuple[str, str], dict[str, Any]], policy: str
) -> None:
    ends, first, met, met_critical, steps = FIVE[policy]
    case = found["five", policy]
    assert case["end_ms"] == list(ends)
    assert case["first_token_ms"] == [17, 17, 17, 26, first]
    assert (case["met"], case["met_critical"]) == (flags(met), flags(met_critical))
    assert case["steps"] == steps
    goodput = (case["token_goodput"], case["token_goodput_critical"])
    shown = tuple(f"{per_s / 1000:.4f}".lstrip("0") for per_s in goodput)
    assert shown == FIVE_GOODPUT[policy]


@pytest.mark.parametrize("name", SMALL)
def test_each_convention_gives_the_known_sequence(
    found: dict[tuple[str, str], dict[str, Any]], name: str
) -> None:
    assert found[name, SMALL_POLICY[name]]["steps"] == SMALL[name]


def test_chunks_of_a_prompt_give_the_first_token_at_their_end(
    found: dict[tuple[str, str], dict[str, Any]],
) -> None:
    assert found["chunk", "off"]["first_token_ms"] == [26, 35]


def test_a_nested_fork_counts_all_tokens_and_its_longest_way(
    found: dict[tuple[str, str], dict[str, Any]],
) -> None:
    case = found["nested", "eager"]
    assert (case["total_output_tokens"], case["critical_tokens"]) == (13, 8)


@pytest.mark.parametrize("policy", MEDIUM)
def test_two_hundred_requests_give_the_known_totals(
    found: dict[tuple[str, str], dict[str, Any]], policy: str
) -> None:
    case = found["medium", policy]
    totals = (
        max(case["end_ms"]),
        case["num_steps"],
        case["prefill_ms"],
        case["num_ttft_met"],
        sum(case["met"]),
        sum(case["met_critical"]),
        case["good_tokens"],
        case["good_tokens_critical"],
    )
    assert totals == MEDIUM[policy]
    assert case["num_rows"] == 16647
    assert (case["total_output_tokens"], case["critical_tokens"]) == (16847, 7853)
