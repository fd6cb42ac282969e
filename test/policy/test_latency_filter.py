"""The filter behind the step-latency model, on machines that others use too."""

from __future__ import annotations

import math
import random

import pytest

from sglang_taper.policy.latency import StepLatencyModel
from sglang_taper.policy.latency_filter import StepFilter
from sglang_taper.policy.latency_fit import sample_of

SIZES = ((1, 500), (50, 40_000), (128, 9000), (200, 300_000))


def true_ms(rows: int, kv_tokens: int) -> float:
    return 7.0 + 0.05 * rows + 2e-5 * kv_tokens


def test_a_machine_busy_with_something_else_does_not_change_the_price_of_a_row() -> (
    None
):
    """Always six rows, and their tokens grow just while steps become longer."""
    rng, model = random.Random(8), StepLatencyModel()
    for _ in range(64):
        rows, tokens = rng.randint(1, 200), rng.randint(100, 400_000)
        model.observe(rows, tokens, true_ms(rows, tokens) * rng.gauss(1, 0.08))
    for step in range(400):
        tokens = 3000 + 30 * (step % 100)
        busy = 1.25 if step % 100 > 50 else 1.0
        model.observe(6, tokens, busy * true_ms(6, tokens) * rng.gauss(1, 0.08))
    profile = StepLatencyModel.from_profile(model.to_profile())
    for size in SIZES:
        expected = pytest.approx(1.125 * true_ms(*size), rel=0.25)
        assert profile.predict(*size) == expected


def test_what_is_known_of_a_coefficient_is_a_variance_whatever_comes() -> None:
    rng = random.Random(9)
    learned = StepFilter([7.0, 0.05, 2e-5], [1.0, 0.01, 1e-6])
    for _ in range(2000):
        rows, tokens = rng.choice([1, 1, 1, 200]), rng.choice([0, 10, 10**7])
        learned.observe(sample_of(rows, tokens, rng.lognormvariate(2, 2)))
        covariance = learned._covariance
        for i in range(4):
            assert covariance[i][i] >= 0
            for j in range(4):
                assert covariance[i][j] == pytest.approx(covariance[j][i], rel=1e-6)


def test_steps_of_every_length_there_is_end_in_no_error() -> None:
    rng, model = random.Random(0), StepLatencyModel()
    for _ in range(5000):
        rows, tokens = rng.randint(1, 100), rng.randint(0, 10**6)
        model.observe(rows, tokens, 10 ** rng.uniform(-3, 7))
        assert 0 <= model.predict(rows, tokens) < math.inf


def test_an_engine_whose_rows_alone_become_dearer_is_learned_again() -> None:
    def changed_ms(rows: int, tokens: int) -> float:
        return true_ms(rows, tokens) + 0.1 * rows

    rng, model = random.Random(1), StepLatencyModel()
    for step in range(496):
        rows = rng.randint(1, 200)
        tokens = rows * rng.randint(100, 2000)
        step_ms = true_ms if step < 400 else changed_ms
        model.observe(rows, tokens, step_ms(rows, tokens) * rng.gauss(1, 0.01))
    for size in SIZES:
        assert model.predict(*size) == pytest.approx(changed_ms(*size), rel=0.1)


@pytest.mark.parametrize(("times", "steps"), [(2, 20), (5, 16), (100, 16), (10, 50)])
def test_a_machine_that_becomes_slow_and_fast_for_ever_does_no_harm(
    times: float, steps: int
) -> None:
    rng, model = random.Random(0), StepLatencyModel()
    for step in range(6000):
        rows, tokens = rng.randint(1, 32), rng.randint(0, 10**5)
        slow = times if step // steps % 2 else 1.0
        model.observe(rows, tokens, slow * true_ms(rows, tokens) * rng.gauss(1, 0.01))
        assert model.predict(rows, tokens) < 10 * times * true_ms(rows, tokens)
    assert model._filter is not None
    assert all(model._filter._covariance[i][i] >= 0 for i in range(4))
