"""The step-latency model: accuracy, robustness, health, profiles."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_taper.errors import FieldError
from sglang_taper.policy.latency import StepLatencyModel, bucket_rows, predict_ms
from sglang_taper.policy.types import LatencyCoefficients

A, B, C = 7.0, 0.05, 2e-5


def true_ms(rows: int, kv_tokens: int) -> float:
    return A + B * rows + C * kv_tokens


def feed(
    model: StepLatencyModel,
    count: int,
    step_ms: Callable[[int, int], float] = true_ms,
    seed: int = 0,
) -> None:
    """Varied steps as in a busy server."""
    rng = random.Random(seed)
    for _ in range(count):
        rows = rng.randint(1, 200)
        kv_tokens = rows * rng.randint(100, 2000)
        model.observe(rows, kv_tokens, step_ms(rows, kv_tokens))


def coefficients(model: StepLatencyModel) -> tuple[float, float, float]:
    c = model.coefficients()
    return c.a_ms, c.b_ms_per_row, c.c_ms_per_token


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 600),
            st.integers(-1, 10**7),
            st.floats(allow_nan=True, allow_infinity=True),
        )
        | st.tuples(st.integers(1, 4), st.integers(0, 9), st.floats(1e-3, 1e7)),
        min_size=16,
        max_size=80,
    )
)
@settings(max_examples=100, deadline=None)
def test_coefficients_are_never_negative_whatever_is_observed(samples: list) -> None:
    model = StepLatencyModel()
    for sample in samples:
        model.observe(*sample)
    assert all(0 <= value < math.inf for value in coefficients(model))


@given(
    st.floats(1, 50), st.floats(0.02, 0.5), st.floats(1e-5, 1e-4), st.integers(0, 99)
)
@settings(max_examples=25, deadline=None)
def test_noiseless_steps_give_the_exact_coefficients(
    a: float, b: float, c: float, seed: int
) -> None:
    model = StepLatencyModel()
    feed(model, 256, lambda rows, tokens: a + b * rows + c * tokens, seed)
    assert coefficients(model) == pytest.approx((a, b, c), rel=1e-6)


def test_a_term_that_costs_nothing_stays_at_zero() -> None:
    model = StepLatencyModel()
    feed(model, 256, lambda rows, tokens: 4.0 + C * tokens)
    a, b, c = coefficients(model)
    assert (a, c) == pytest.approx((4.0, C), rel=1e-6)
    assert b == pytest.approx(0.0, abs=1e-8)


@given(
    st.builds(
        LatencyCoefficients,
        st.floats(0, 100),
        st.floats(0, 5),
        st.floats(0, 1),
        graph_buckets=st.sampled_from([(), (1, 2, 4), (8, 64)]),
    ),
    st.integers(1, 100),
    st.integers(0, 10**6),
)
def test_predictions_never_fall_when_rows_or_tokens_are_added(
    model: LatencyCoefficients, rows: int, kv_tokens: int
) -> None:
    now = predict_ms(model, rows, kv_tokens)
    assert predict_ms(model, rows + 1, kv_tokens) >= now
    assert predict_ms(model, rows, kv_tokens + 1) >= now


def test_rows_are_rounded_up_to_a_captured_size_and_not_beyond_the_largest() -> None:
    assert [bucket_rows(n, (2, 4, 8)) for n in (1, 2, 3, 5, 8, 9)] == [2, 2, 4, 8, 8, 9]
    assert bucket_rows(3, ()) == 3


def test_steps_that_replay_padded_graphs_are_learned_as_such() -> None:
    buckets = tuple(range(16, 257, 16))
    model = StepLatencyModel(graph_buckets=buckets)
    feed(model, 256, lambda rows, t: true_ms(bucket_rows(rows, buckets), t))
    assert coefficients(model) == pytest.approx((A, B, C), rel=1e-6)
    assert model.predict(17, 0) == model.predict(32, 0)


def assert_predicts(
    model: StepLatencyModel, step_ms: Callable[[int, int], float], rel: float
) -> None:
    for rows, kv_tokens in ((1, 500), (50, 40_000), (128, 9000), (200, 300_000)):
        expected = pytest.approx(step_ms(rows, kv_tokens), rel=rel)
        assert model.predict(rows, kv_tokens) == expected


def test_one_step_in_twenty_being_fifty_times_too_long_changes_nothing() -> None:
    rng, model = random.Random(1), StepLatencyModel()

    def step_ms(rows: int, kv_tokens: int) -> float:
        slow = 50 if rng.random() < 0.05 else 1
        return true_ms(rows, kv_tokens) * rng.uniform(0.98, 1.02) * slow

    feed(model, 512, step_ms)
    assert_predicts(model, true_ms, rel=0.02)
    assert model.trusted


def test_steps_thrice_too_long_now_and_then_leave_little_bias() -> None:
    rng, model = random.Random(6), StepLatencyModel()
    feed(model, 512, lambda r, t: true_ms(r, t) * (3 if rng.random() < 0.05 else 1))
    assert_predicts(model, true_ms, rel=0.02)


def test_a_first_step_that_compiles_for_a_minute_does_not_poison_the_model() -> None:
    model = StepLatencyModel()
    model.observe(1, 100, 60_000.0)
    feed(model, 15)
    assert coefficients(model) == pytest.approx((A, B, C), rel=1e-3)


def test_noise_of_a_few_percent_leaves_an_error_below_the_noise() -> None:
    rng, model = random.Random(2), StepLatencyModel()
    feed(model, 1000, lambda r, t: true_ms(r, t) * rng.uniform(0.97, 1.03))
    assert model.mape is not None
    assert model.mape < 0.02


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_change_of_speed_is_learned_within_twenty_steps(factor: float) -> None:
    model = StepLatencyModel()
    feed(model, 256)
    feed(model, 20, lambda r, t: factor * true_ms(r, t), seed=5)
    assert_predicts(model, lambda r, t: factor * true_ms(r, t), rel=0.01)


@pytest.mark.parametrize("pace", [1.2, 0.85])
def test_predictions_follow_a_pace_that_is_soon_over(
    pace: float,
) -> None:
    model = StepLatencyModel()
    feed(model, 256)
    feed(model, 20, lambda r, t: pace * true_ms(r, t), seed=5)
    assert model.predict(100, 50_000) == pytest.approx(
        pace * true_ms(100, 50_000), rel=0.02
    )
    feed(model, 24, seed=6)
    assert model.predict(100, 50_000) == pytest.approx(true_ms(100, 50_000), rel=0.02)
    assert model.num_drifts == 0


def test_a_few_steps_fifty_times_too_long_hardly_change_a_prediction() -> None:
    model = StepLatencyModel()
    feed(model, 256)
    feed(model, 8, lambda r, t: 50 * true_ms(r, t), seed=5)
    assert_predicts(model, true_ms, rel=0.01)


def test_each_change_of_speed_is_counted_and_noise_is_not() -> None:
    rng, model = random.Random(7), StepLatencyModel()
    feed(model, 500, lambda r, t: true_ms(r, t) * rng.uniform(0.8, 1.2))
    assert model.num_drifts == 0
    feed(model, 100, lambda r, t: 3 * true_ms(r, t), seed=1)
    assert (model.num_drifts, model.trusted) == (1, True)
    feed(model, 100, true_ms, seed=2)
    assert model.num_drifts == 2


def test_an_engine_that_no_refit_describes_loses_trust() -> None:
    model, count = StepLatencyModel(), 0
    feed(model, 256)

    def erratic(rows: int, kv_tokens: int) -> float:
        nonlocal count
        count += 1
        return true_ms(rows, kv_tokens) * (6 if count % 40 < 20 else 1)

    feed(model, 200, erratic, seed=3)
    assert model.num_drifts > 2
    assert not model.trusted


def test_a_slower_engine_is_taken_to_be_slower_at_sizes_not_seen_since() -> None:
    model = StepLatencyModel()
    feed(model, 256)
    for _ in range(20):
        model.observe(64, 40_000, 2 * true_ms(64, 40_000))
    assert model.predict(128, 9000) == pytest.approx(2 * true_ms(128, 9000), rel=0.01)


def test_a_batch_that_never_changes_size_does_not_move_what_it_cannot_tell() -> None:
    rng, model = random.Random(3), StepLatencyModel()
    feed(model, 256)
    for step in range(2000):
        tokens = 40_000 + step % 50
        model.observe(64, tokens, true_ms(64, tokens) * rng.uniform(0.97, 1.03))
    assert model.predict(64, 40_000) == pytest.approx(true_ms(64, 40_000), rel=0.01)
    assert model.predict(128, 80_000) == pytest.approx(true_ms(128, 80_000), rel=0.05)


def test_a_model_is_trusted_from_its_sixteenth_step() -> None:
    model = StepLatencyModel()
    feed(model, 15)
    assert (model.trusted, model.predict(9, 9), model.mape) == (False, 0.0, None)
    feed(model, 1)
    assert model.trusted
    assert model.coefficients().trusted


def test_trust_is_lost_above_30_percent_and_comes_back_below_20() -> None:
    rng, model = random.Random(4), StepLatencyModel()
    feed(model, 64)
    feed(model, 200, lambda r, t: true_ms(r, t) * math.exp(rng.gauss(0, 0.9)))
    assert model.mape is not None
    assert model.mape > 0.3
    assert not model.trusted
    assert not model.coefficients().trusted
    errors = []
    while not model.trusted:
        errors.append(model.mape)
        feed(model, 1, seed=len(errors))
    assert min(errors) >= 0.2
    assert any(error < 0.3 for error in errors)
    assert model.coefficients().trusted


def test_error_is_that_of_predictions_made_before_the_step_was_seen() -> None:
    model = StepLatencyModel.from_profile(profile())
    model.observe(10, 1000, 2 * model.predict(10, 1000))
    assert model.mape == pytest.approx(0.5)
    assert model.coefficients().error == model.mape


def test_plans_never_see_an_error_above_one() -> None:
    model = StepLatencyModel.from_profile(profile())
    assert model.coefficients().error == 0.0
    model.observe(10, 1000, model.predict(10, 1000) / 40)
    assert model.mape > 30
    assert model.coefficients().error == 1.0


@pytest.mark.parametrize(
    ("rows", "kv_tokens", "step_ms"),
    [(0, 10, 5.0), (1, -1, 5.0), (1, 10, 0.0), (1, 10, -1.0), (1, 10, math.nan)],
)
def test_impossible_samples_are_ignored(
    rows: int, kv_tokens: int, step_ms: float
) -> None:
    model = StepLatencyModel()
    model.observe(rows, kv_tokens, step_ms)
    assert model.num_samples == 0


def profile(**changes: Any) -> dict[str, Any]:
    return {"a_ms": 5.0, "b_ms_per_row": 0.1, "c_ms_per_token": 1e-5, **changes}


def test_a_profile_survives_json_and_is_trusted_at_once() -> None:
    model = StepLatencyModel(shared_read_once=True, graph_buckets=(1, 2, 4))
    feed(model, 256)
    feed(model, 8, lambda r, t: 1.2 * true_ms(r, t))
    text = json.dumps(model.to_profile())
    loaded = StepLatencyModel.from_profile(json.loads(text))
    assert loaded.to_profile() == model.to_profile()
    assert loaded.trusted
    # What passes is not part of a profile.
    assert model.pace > 1.1
    assert loaded.pace == 1


def test_a_model_from_a_profile_goes_on_learning() -> None:
    model = StepLatencyModel.from_profile(profile())
    feed(model, 256)
    assert_predicts(model, true_ms, rel=0.01)


@pytest.mark.parametrize(
    "bad",
    [
        {"a_ms": -1.0},
        {"b_ms_per_row": math.nan},
        {"c_ms_per_token": math.inf},
        {"a_ms": 1e160},
        {"b_ms_per_row": 1.1e7},
        {"c_ms_per_token": 10**400},
        {"a_ms": "7"},
        {"b_ms_per_row": True},
        {"c_ms_per_token": None},
        {"d_ms": 1.0},
        {"shared_read_once": 1},
        {"graph_buckets": [4, 2]},
        {"graph_buckets": [0, 2]},
        {"graph_buckets": "8"},
    ],
)
def test_a_profile_with_a_bad_entry_is_refused_naming_it(bad: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=f"latency_profile.{next(iter(bad))}="):
        StepLatencyModel.from_profile(profile(**bad))


def test_a_profile_without_a_coefficient_is_refused_naming_it() -> None:
    incomplete = profile()
    del incomplete["b_ms_per_row"]
    with pytest.raises(FieldError, match=r"latency_profile\.b_ms_per_row"):
        StepLatencyModel.from_profile(incomplete)


def test_a_profile_in_which_nothing_costs_anything_is_refused() -> None:
    free = profile(a_ms=0.0, b_ms_per_row=0, c_ms_per_token=0)
    with pytest.raises(FieldError, match=r"latency_profile\.a_ms="):
        StepLatencyModel.from_profile(free)


def test_predictions_are_in_step_with_published_coefficients() -> None:
    model = StepLatencyModel.from_profile(profile(graph_buckets=[8, 16]))
    published = model.coefficients()
    for rows in (1, 8, 9, 40):
        assert model.predict(rows, 500) == predict_ms(published, rows, 500)
    assert all(low <= high for low, high in pairwise(published.graph_buckets))
