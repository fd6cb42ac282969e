"""What a policy believes a step will cost: the truth, or wrong on purpose."""

from __future__ import annotations

import random
from collections import deque
from typing import Protocol

import msgspec

from sglang_taper.policy.latency import StepLatencyModel
from sglang_taper.policy.types import LatencyCoefficients

CONSTANT_WINDOW = 256
# Mean absolute value of a normal error, as a share of its standard deviation.
MEAN_DEVIATION = 0.8


class Predictor(Protocol):
    """`coefficients` are asked for once per step; `observe` tells how it went."""

    def coefficients(self) -> LatencyCoefficients: ...
    def observe(self, rows: int, kv_tokens: int, step_ms: float) -> None: ...


class ScaledPredictor:
    """The true model times `1 + bias`, and times a random factor at each step.

    `noise` is the standard deviation of that factor around 1; it is kept above 0.1.
    Policies are told how wrong it is, as by a model that sees its errors.
    """

    def __init__(
        self,
        truth: LatencyCoefficients,
        bias: float = 0.0,
        noise: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self.truth = truth
        self.factor, self.noise = 1 + bias, noise
        self.rng = rng or random.Random(0)
        error = min(1.0, abs(bias) + MEAN_DEVIATION * noise)
        told = msgspec.structs.replace(truth, error=error)
        self._biased = scaled(told, self.factor)

    def coefficients(self) -> LatencyCoefficients:
        if not self.noise:
            return self._biased
        return scaled(self._biased, max(0.1, self.rng.gauss(1.0, self.noise)))

    def observe(self, rows: int, kv_tokens: int, step_ms: float) -> None:
        """Nothing to learn."""


class ConstantPredictor:
    """Every step is predicted to take as long as the mean of the last ones did."""

    def __init__(self, truth: LatencyCoefficients) -> None:
        self._model = msgspec.structs.replace(
            truth, a_ms=0.0, b_ms_per_row=0.0, c_ms_per_token=0.0, graph_buckets=()
        )
        self._durations: deque[float] = deque(maxlen=CONSTANT_WINDOW)

    def coefficients(self) -> LatencyCoefficients:
        if not self._durations:
            return self._model
        mean_ms = sum(self._durations) / len(self._durations)
        return msgspec.structs.replace(self._model, a_ms=mean_ms)

    def observe(self, rows: int, kv_tokens: int, step_ms: float) -> None:
        self._durations.append(step_ms)


def learned_predictor(truth: LatencyCoefficients) -> StepLatencyModel:
    """The server's own model, which knows nothing yet."""
    return StepLatencyModel(
        shared_read_once=truth.shared_read_once, graph_buckets=truth.graph_buckets
    )


def scaled(model: LatencyCoefficients, factor: float) -> LatencyCoefficients:
    if factor == 1:
        return model
    return msgspec.structs.replace(
        model,
        a_ms=factor * model.a_ms,
        b_ms_per_row=factor * model.b_ms_per_row,
        c_ms_per_token=factor * model.c_ms_per_token,
    )
