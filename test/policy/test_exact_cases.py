"""A small workload whose schedule was worked out by another implementation.

Step 10 + rows ms, prefill 5 + tokens ms, prompts of 4 tokens, TTFT 30 ms, TPOT 18 ms,
no stall correction. The batch is in order of requests: among rows that waited equally
and made equal progress, an earlier request goes first. The published rule protects
every request; ours leaves out lost ones, of which this workload has none under a policy
that looks at slack, so both rules give the same schedule.
"""

from __future__ import annotations

from typing import Any

import pytest
from factories import MODEL, DecodeLoop, Program, Stage

from sglang_taper.policy.state import RequestState
from sglang_taper.policy.types import PolicyParams

WORKLOAD: list[tuple[float, list[Stage]]] = [
    (0.0, [6]),
    (0.0, [2, (3, 5), 2]),
    (0.0, [3]),
    (12.0, [1, (2, 2, 2), 1]),
    (40.0, [4]),
]

TAPER_TAIL = "D109:3 D120:1 D131:1 D142:1 D153:1"
CASES = {
    "off": (
        {"policy": "off"},
        [105, 173, 64, 129, 92],
        "P17:3 P26:1 D40:4 P49:1 D64:5 D78:4 D92:4 D105:3 D117:2 D129:2 D140:1 "
        "D151:1 D162:1 D173:1",
    ),
    "eager": (
        {"policy": "eager"},
        [110, 143, 69, 84, 98],
        "P17:3 P26:1 D42:6 P51:1 D69:8 D84:5 D98:4 D110:2 D121:1 D132:1 D143:1",
    ),
    "cap 2": (
        {"policy": "cap", "cap": 2},
        [110, 143, 67, 98, 98],
        "P17:3 P26:1 D41:5 P50:1 D67:7 D83:6 D98:5 D110:2 D121:1 D132:1 D143:1",
    ),
    "taper, rho 1, progress": (
        {"rho": 1.0, "deadline": "progress"},
        [109, 153, 64, 109, 96],
        f"P17:3 P26:1 D40:4 P49:1 D64:5 D81:7 D96:5 {TAPER_TAIL}",
    ),
    "taper, rho 0.5, progress": (
        {"rho": 0.5, "deadline": "progress"},
        [109, 153, 64, 109, 96],
        f"P17:3 P26:1 D40:4 P49:1 D64:5 D80:6 D96:6 {TAPER_TAIL}",
    ),
    "taper, rho 1, schedule": (
        {"rho": 1.0, "deadline": "schedule"},
        [107, 163, 64, 119, 92],
        "P17:3 P26:1 D40:4 P49:1 D64:5 D78:4 D92:4 D107:5 D119:2 D130:1 D141:1 "
        "D152:1 D163:1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_five_requests_run_in_the_published_sequence(case: str) -> None:
    changes: dict[str, Any]
    changes, end_times, sequence = CASES[case]
    programs = [
        Program(RequestState(f"r{i}", arrival_ms, 30.0, 18.0), list(stages), 4)
        for i, (arrival_ms, stages) in enumerate(WORKLOAD)
    ]
    trace = DecodeLoop(PolicyParams(**changes), MODEL, programs, by_request=True).run()
    assert " ".join(trace) == sequence
    assert [program.ended_ms for program in programs] == end_times
