"""What a step reads once: everything that was asked for, or what the gate says pays."""

from __future__ import annotations

import pytest

from sglang_taper.engine.attention.gate import StepGate, parents_first
from sglang_taper.ops.segments import Segment
from sglang_taper.policy.attention_gate import AttentionConstants, AttentionMode
from sglang_taper.policy.attention_profile import MeasuredAttention

PLAIN, CASCADE = AttentionMode.PLAIN, AttentionMode.CASCADE
# 64 query and 8 KV heads: 4096 bytes per token; 4 TB/s from memory, 5 from the cache.
MEASURED = MeasuredAttention(
    device="a device",
    heads="64/8/128",
    name="cascade 64",
    tile_rows=64,
    constants=AttentionConstants(
        dram_bytes_per_us=4e6,
        cached_bytes_per_us=5e6,
        flop_per_us=4e8,
        base_us=5.0,
        extra_us=8.0,
        extra_us_per_row=0.0,
        error=0.02,
    ),
)
LONG = [Segment(tuple(range(8)), 0, 8192)]
SHORT = [Segment(tuple(range(8)), 0, 64)]


def lens(segments: list[Segment], own: int = 100) -> list[int]:
    return [segments[0].end + own] * 8


def test_what_was_asked_for_is_shared_whether_it_pays_or_not() -> None:
    gate = StepGate(always=True)
    decision = gate.decide(SHORT, lens(SHORT), PLAIN)
    assert (decision.segments, decision.reason) == (tuple(SHORT), "asked_for")
    assert decision.mode is CASCADE
    assert gate.decide([], [5, 6], CASCADE).reason == "nothing_shared"
    assert not gate.never


def test_without_measured_constants_nothing_is_shared() -> None:
    gate = StepGate(always=False)
    decision = gate.decide(LONG, lens(LONG), CASCADE)
    assert (decision.segments, decision.reason) == ((), "unmeasured")
    assert gate.never


def test_the_cost_model_decides_with_measured_constants() -> None:
    gate = StepGate(False, MEASURED)
    assert gate.decide(LONG, lens(LONG), PLAIN).segments == tuple(LONG)
    assert gate.decide(LONG, lens(LONG), PLAIN).reason == "gain"
    refused = gate.decide(SHORT, lens(SHORT), CASCADE)
    assert (refused.segments, refused.reason) == ((), "no_gain")
    assert not gate.never


def test_the_last_mode_is_held_between_the_limits() -> None:
    gate = StepGate(False, MEASURED)
    held = []
    for tokens in range(64, 4096, 16):
        segments = [Segment(tuple(range(8)), 0, tokens)]
        modes = [
            gate.decide(segments, lens(segments), m).mode for m in (PLAIN, CASCADE)
        ]
        held.append(modes == [PLAIN, CASCADE])
        assert modes != [CASCADE, PLAIN]
    assert any(held)


def test_groups_that_do_not_pay_are_left_to_their_rows() -> None:
    gate = StepGate(False, MEASURED)
    lone = Segment((9,), 0, 500)
    decision = gate.decide([*LONG, lone], [8300] * 8 + [10, 600], PLAIN)
    assert decision.segments == tuple(LONG)


def test_nothing_is_kept_below_a_segment_that_was_left_out() -> None:
    root, inner, leaf = (
        Segment((0, 1, 2), 0, 10),
        Segment((0, 1), 10, 30),
        Segment((0, 1), 30, 60),
    )
    assert parents_first([root, inner, leaf]) == (root, inner, leaf)
    assert parents_first([inner, leaf]) == ()
    assert parents_first([root, leaf]) == (root,)


@pytest.mark.parametrize("always", [True, False])
def test_the_same_question_has_the_same_answer(always: bool) -> None:
    gate = StepGate(always, MEASURED)
    answers = [gate.decide(LONG, lens(LONG), PLAIN) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
