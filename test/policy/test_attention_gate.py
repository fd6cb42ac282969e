"""The gate between plain and cascade attention: its predictions and decisions."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.errors import FieldError
from sglang_taper.policy.attention_fit import AttentionTiming, fit_constants
from sglang_taper.policy.attention_gate import (
    HYSTERESIS,
    MIN_GAIN,
    AttentionConstants,
    AttentionMode,
    GateReason,
    LayerShape,
    SharedSegment,
    StepShape,
    constants_from_profile,
    constants_to_profile,
    decide,
    pays,
    predict_cascade_us,
    predict_plain_us,
    predicted_gain,
)

PLAIN, CASCADE = AttentionMode.PLAIN, AttentionMode.CASCADE
# A Hopper GPU as the cost model of the literature notes assumes it; 5 us of launches.
HOPPER = AttentionConstants(4.3e6, 5.5e6, 400e6, 5.0, 8.0, 0.05, 0.0)
WIDE = LayerShape(num_kv_heads=8, head_ratio=8, head_dim=128)
ONE_KV_HEAD = LayerShape(num_kv_heads=1, head_ratio=8, head_dim=128)
SMALL = LayerShape(num_kv_heads=3, head_ratio=3, head_dim=64)


def groups(count: int, width: int, shared: int, private: int = 128) -> StepShape:
    rows = count * width
    segments = (SharedSegment(width, shared),) * count
    return StepShape(segments, rows, rows * private)


@pytest.mark.parametrize(
    ("step", "plain_us", "cascade_us"),
    [
        (groups(32, 2, 8192), 402, 272),
        (groups(8, 8, 1024), 60, 32),
        (groups(8, 8, 8192), 402, 86),
        (groups(8, 8, 8192, private=2048), 494, 204),
        (groups(1, 64, 32768, private=256), 1580, 225),
    ],
)
def test_predictions_for_64_query_and_8_kv_heads(
    step: StepShape, plain_us: float, cascade_us: float
) -> None:
    assert predict_plain_us(HOPPER, WIDE, step) == pytest.approx(plain_us, rel=0.03)
    assert predict_cascade_us(HOPPER, WIDE, step) == pytest.approx(cascade_us, rel=0.1)


@pytest.mark.parametrize(
    ("shape", "width", "tokens"),
    [
        *((WIDE, w, t) for w, t in ((2, 14_900), (4, 3_900), (8, 1_600), (16, 730))),
        *((ONE_KV_HEAD, w, t) for w, t in ((2, 119_000), (8, 12_800), (32, 2_800))),
        *((SMALL, w, t) for w, t in ((4, 21_000), (8, 8_500), (16, 3_900))),
    ],
)
def test_break_even_length_of_one_group(
    shape: LayerShape, width: int, tokens: int
) -> None:
    """Reads alone, in tiles of 128, against 8 us of extra cost."""
    shape = msgspec.structs.replace(shape, tile_rows=128)
    reads = AttentionConstants(4.3e6, 5.5e6, 1e12, 0.0, 8.0, 0.0, 0.0)
    below, above = (groups(1, width, int(tokens * f), 0) for f in (0.95, 1.05))
    assert predicted_gain(reads, shape, below) < 0 < predicted_gain(reads, shape, above)


def test_a_narrow_group_in_a_large_tile_is_bound_by_compute() -> None:
    step = groups(8, 8, 8192)
    large = msgspec.structs.replace(WIDE, tile_rows=128)
    more = predict_cascade_us(HOPPER, large, step)
    assert more == pytest.approx(108, rel=0.05)
    assert more > predict_cascade_us(HOPPER, WIDE, step)


def test_few_kv_heads_and_short_prefixes_stay_plain() -> None:
    for shape, step in (
        (ONE_KV_HEAD, groups(4, 8, 2048)),
        (SMALL, groups(4, 8, 512)),
        (WIDE, groups(1, 2, 1024)),
        (WIDE, groups(8, 8, 64)),
    ):
        decision = decide(HOPPER, shape, step, CASCADE)
        assert (decision.mode, decision.reason) == (PLAIN, GateReason.NO_GAIN)
    decision = decide(HOPPER, WIDE, groups(8, 8, 1024))
    assert (decision.mode, decision.reason) == (CASCADE, GateReason.GAIN)


def test_without_measurements_everything_is_plain() -> None:
    decision = decide(None, WIDE, groups(8, 8, 8192), CASCADE)
    assert (decision.mode, decision.reason) == (PLAIN, GateReason.UNMEASURED)


def test_a_step_that_cascade_can_not_do_is_plain() -> None:
    decision = decide(HOPPER, WIDE, groups(8, 8, 8192), CASCADE, supported=False)
    assert (decision.mode, decision.reason) == (PLAIN, GateReason.UNSUPPORTED)


@pytest.mark.parametrize(
    "segments", [(), (SharedSegment(1, 9000),), (SharedSegment(8, 0),)]
)
def test_a_step_that_shares_nothing_is_plain(
    segments: tuple[SharedSegment, ...],
) -> None:
    decision = decide(HOPPER, WIDE, StepShape(segments, 8, 800), CASCADE)
    assert (decision.mode, decision.reason) == (PLAIN, GateReason.NOTHING_SHARED)


constants = st.builds(
    lambda dram, ratio, flop, base, extra, per_row, error: AttentionConstants(
        dram, dram * ratio, flop, base, extra, per_row, error
    ),
    st.floats(1e3, 1e7),
    st.floats(1, 5),
    st.floats(1e5, 1e9),
    st.floats(0, 100),
    st.floats(0, 100),
    st.floats(0, 1),
    st.floats(0, 0.5),
)
shapes = st.builds(
    LayerShape,
    st.integers(1, 16),
    st.integers(1, 16),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([16, 64, 128]),
)
segments = st.lists(
    st.builds(SharedSegment, st.integers(1, 64), st.integers(0, 40_000)), max_size=12
)
steps = st.builds(
    StepShape, segments.map(tuple), st.integers(1, 512), st.integers(0, 10**6)
)
modes = st.sampled_from(AttentionMode)


@given(constants, shapes, steps, modes)
def test_cascade_is_never_chosen_for_less_than_the_margin(
    constants: AttentionConstants,
    shape: LayerShape,
    step: StepShape,
    previous: AttentionMode,
) -> None:
    decision = decide(constants, shape, step, previous)
    gain = predicted_gain(constants, shape, step)
    if decision.mode is CASCADE:
        assert gain >= MIN_GAIN + constants.error
    elif gain >= MIN_GAIN + constants.error + HYSTERESIS:
        assert decision.reason is GateReason.NOTHING_SHARED


@given(constants, shapes, steps, st.integers(0, 10**5))
def test_more_private_tokens_never_turn_plain_into_cascade(
    constants: AttentionConstants, shape: LayerShape, step: StepShape, more: int
) -> None:
    longer = msgspec.structs.replace(step, private_tokens=step.private_tokens + more)
    if decide(constants, shape, step).mode is PLAIN:
        assert decide(constants, shape, longer).mode is PLAIN


@given(constants, shapes, steps, st.floats(0, 100), modes)
def test_a_larger_extra_cost_never_turns_plain_into_cascade(
    constants: AttentionConstants,
    shape: LayerShape,
    step: StepShape,
    more: float,
    previous: AttentionMode,
) -> None:
    dearer = msgspec.structs.replace(constants, extra_us=constants.extra_us + more)
    if decide(constants, shape, step, previous).mode is PLAIN:
        assert decide(dearer, shape, step, previous).mode is PLAIN


@given(constants, shapes, steps, st.integers(1, 64), st.integers(0, 1000))
def test_predictions_never_fall_when_something_is_added(
    constants: AttentionConstants,
    shape: LayerShape,
    step: StepShape,
    rows: int,
    tokens: int,
) -> None:
    added = SharedSegment(rows, tokens)
    larger = msgspec.structs.replace(step, segments=(*step.segments, added))
    for predict in (predict_plain_us, predict_cascade_us):
        before = predict(constants, shape, step)
        assert predict(constants, shape, larger) >= before * (1 - 1e-12)


@given(
    constants, shapes, steps, st.lists(st.floats(0.99, 1.01), min_size=2, max_size=40)
)
def test_jitter_of_a_percent_changes_the_mode_at_most_once(
    constants: AttentionConstants,
    shape: LayerShape,
    step: StepShape,
    jitter: list[float],
) -> None:
    mode, changes = PLAIN, 0
    for factor in jitter:
        tokens = int(step.private_tokens * factor)
        jittered = msgspec.structs.replace(step, private_tokens=tokens)
        decided = decide(constants, shape, jittered, mode).mode
        changes += decided is not mode
        mode = decided
    assert changes <= 1


def test_between_the_limits_the_mode_stays_what_it_was() -> None:
    step = next(
        step
        for step in (groups(8, 8, 100 + i) for i in range(1000))
        if predicted_gain(HOPPER, WIDE, step) > MIN_GAIN + HYSTERESIS / 2
    )
    for previous in AttentionMode:
        decision = decide(HOPPER, WIDE, step, previous)
        assert (decision.mode, decision.reason) == (previous, GateReason.HELD)


def test_a_segment_pays_by_itself_or_is_better_left_to_its_rows() -> None:
    assert pays(HOPPER, WIDE, SharedSegment(8, 256))
    assert not pays(HOPPER, WIDE, SharedSegment(1, 8192))
    # two rows of a 128-row tile: compute costs more than the second read
    large = msgspec.structs.replace(WIDE, tile_rows=128)
    slow = msgspec.structs.replace(HOPPER, flop_per_us=200e6)
    assert not pays(slow, large, SharedSegment(2, 8192))


def test_constants_survive_json() -> None:
    profile = json.loads(json.dumps(constants_to_profile(HOPPER)))
    assert constants_from_profile(profile) == HOPPER


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_us": -1.0}, "attention_profile.base_us=-1.0"),
        ({"base_us": "fast"}, "attention_profile.base_us='fast'"),
        ({"base_us": True}, "attention_profile.base_us=True"),
        ({"error": float("nan")}, "attention_profile.error=nan"),
        ({"flop_per_us": 0.0}, "attention_profile.flop_per_us=0"),
        ({"cached_bytes_per_us": 1.0}, "at least dram_bytes_per_us"),
        ({"speed": 1.0}, "attention_profile.speed=1.0"),
    ],
)
def test_profiles_that_can_not_be_are_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        constants_from_profile({**constants_to_profile(HOPPER), **change})
    with pytest.raises(FieldError, match=r"profile\.dram_bytes_per_us=None"):
        constants_from_profile({})


GRID = [
    *(groups(8, 8, p, s) for p in (256, 1024, 8192) for s in (128, 2048)),
    *(groups(32, 2, p) for p in (1024, 8192)),
    *(groups(1, 64, p) for p in (1024, 32768)),
    *(groups(64, 1, 1, s) for s in (128, 8192)),
]


def measured(
    constants: AttentionConstants, shape: LayerShape, noise: float = 0.0
) -> list[AttentionTiming]:
    rng = random.Random(0)
    return [
        AttentionTiming(
            step,
            predict_plain_us(constants, shape, step) * rng.uniform(1, 1 + noise),
            predict_cascade_us(constants, shape, step) * rng.uniform(1, 1 + noise),
        )
        for step in GRID
    ]


def test_fitting_finds_the_constants_that_made_the_timings() -> None:
    shape = msgspec.structs.replace(WIDE, tile_rows=128)
    fitted = fit_constants(measured(HOPPER, shape), shape)
    for field in ("dram_bytes_per_us", "cached_bytes_per_us", "flop_per_us"):
        assert getattr(fitted, field) == pytest.approx(getattr(HOPPER, field), rel=0.02)
    assert fitted.extra_us + 64 * fitted.extra_us_per_row == pytest.approx(
        HOPPER.extra_us + 64 * HOPPER.extra_us_per_row, rel=0.05
    )
    assert fitted.error < 0.02


def test_noise_shows_in_the_error_and_hence_in_the_margin() -> None:
    fitted = fit_constants(measured(HOPPER, WIDE, noise=0.1), WIDE)
    assert 0.02 < fitted.error < 0.15
    for timing in measured(HOPPER, WIDE, noise=0.1):
        if decide(fitted, WIDE, timing.step).mode is CASCADE:
            assert timing.cascade_us < timing.plain_us


def test_too_few_or_impossible_timings_are_refused() -> None:
    timings = measured(HOPPER, WIDE)
    with pytest.raises(FieldError, match="timings=3"):
        fit_constants(timings[:3], WIDE)
    broken = msgspec.structs.replace(timings[0], plain_us=0.0)
    with pytest.raises(FieldError, match=r"timings\[3\]"):
        fit_constants([*timings[:3], broken], WIDE)
