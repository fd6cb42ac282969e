"""A Kalman filter over the steps of an engine: what they cost, and its present pace.

State: the coefficients of `f = a + b*rows + c*kv_tokens` and the logarithm of a pace,
with which a step takes `pace * f`. The pace changes within a few steps and goes back
to 1; the coefficients change over thousands. So what a shared machine does for some
seconds is not taken for the price of a row, and what the steps of a while do not tell
(always the same number of rows) stays as it was. A step far off counts like one a
little off. See Durbin and Koopman, Time Series Analysis by State Space Methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from sglang_taper.policy.latency_fit import Sample, Vector, dot

# In a steady state the pace follows about so many steps; fewer follow noise. What is
# left of its distance to 1 after a step.
PACE_STEPS, PACE_KEPT = 4, 0.98
# What is more than this many times slower or faster is no pace but another engine.
MAX_PACE = 10.0
# Coefficients wander by the noise times this share of themselves in a step.
WANDER = 0.05
# The least a term is taken to be in that, as a share of a whole step: one that cost
# nothing so far may begin to. Wandering makes none less known than a share of itself.
MIN_TERM, MAX_SPREAD = 0.05, 0.5
# Relative spread of a step's time at first, and how small and large it is learned.
NOISE, MIN_NOISE, MAX_NOISE = 0.05, 5e-3, 0.15
NOISE_STEPS = 100
# Standard deviation of normal errors whose absolute values have median 1.
NORMAL_DEVIATION = 1.48
# An error beyond so many of its standard deviations counts as much as one at that, or
# as much as this share of the step if that is more.
MAX_DEVIATIONS, MAX_ERROR = 2.0, 0.1
# Spread of the logarithm of the pace at the start: machines are seldom as they were.
START_SPREAD = 0.2
# Spread added to everything, as a share of it, once the engine is found to be changed.
CHANGED_SPREAD = 0.1

_SIZE = 4
_MAX_LOG_PACE = math.log(MAX_PACE)
_GAIN = 1 / PACE_STEPS
# Variance a step adds to the pace, as a share of that of one measured time, for which
# the stationary gain is `_GAIN`.
_PACE_WANDER = _GAIN * _GAIN / (1 - _GAIN)


class StepFilter:
    """Coefficients `[a, b, c]` (never negative) and pace, learned step by step.

    `spread` is the standard deviation of each coefficient at the start.
    """

    def __init__(self, coefficients: Sequence[float], spread: Sequence[float]) -> None:
        self.coefficients: Vector = list(coefficients)
        self._log_pace = 0.0
        self._noise = NOISE * NOISE
        deviations = (*spread, START_SPREAD)
        self._covariance = [
            [deviations[i] ** 2 if i == j else 0.0 for j in range(_SIZE)]
            for i in range(_SIZE)
        ]

    @classmethod
    def fitted(cls, coefficients: Vector, samples: Sequence[Sample]) -> StepFilter:
        """Starts from a fit to `samples`, which say how well each term is known."""
        made = cls(coefficients, [_share_of_step(samples, j) for j in range(3)])
        errors = sorted(abs(dot(coefficients, sample) - 1) for sample in samples)
        made._set_noise((NORMAL_DEVIATION * errors[len(errors) // 2]) ** 2)
        for sample in samples:
            unit = max(1.0, dot(coefficients, sample))
            made._correct([*(x / unit for x in sample), 0.0], 0.0)
        return made

    @property
    def pace(self) -> float:
        return math.exp(self._log_pace)

    def observe(self, sample: Sample) -> float:
        """Learn from a step, given as `latency_fit.sample_of` gives it.

        Gives the time fitted before that, without the pace, over the measured one.
        """
        fitted = dot(self.coefficients, sample)
        self._let_wander(sample, fitted)
        pace = self.pace
        predicted = pace * fitted
        # Of the measured and the predicted time the longer one is the unit.
        unit = max(1.0, predicted)
        slopes = [*(pace * x / unit for x in sample), predicted / unit]
        variance = self._correct(slopes, (1 - predicted) / unit)
        error = min(((1 - predicted) / unit) ** 2, MAX_DEVIATIONS**2 * variance)
        noise = self._noise + (error / variance - 1) * self._noise / NOISE_STEPS
        self._set_noise(noise)
        return fitted

    def _set_noise(self, variance: float) -> None:
        self._noise = min(max(variance, MIN_NOISE**2), MAX_NOISE**2)

    def rescale(self, factor: float) -> None:
        """The whole engine takes `factor` times as long from now on, or about that."""
        scale = (factor, factor, factor, 1.0)
        self.coefficients = [factor * value for value in self.coefficients]
        for i, row in enumerate(self._covariance):
            self._covariance[i] = [
                scale[i] * s * v for s, v in zip(scale, row, strict=True)
            ]
        self._log_pace = 0.0
        # Hardly ever does everything change alike.
        for i, size in enumerate((*self.coefficients, 1.0)):
            # A product becomes infinite where a power raises OverflowError.
            self._covariance[i][i] += CHANGED_SPREAD * CHANGED_SPREAD * size * size

    def _let_wander(self, sample: Sample, whole: float) -> None:
        """What is known of coefficients and pace before a step is seen."""
        covariance = self._covariance
        self._log_pace *= PACE_KEPT
        covariance[3] = [PACE_KEPT * value for value in covariance[3]]
        for row in covariance:
            row[3] *= PACE_KEPT
        covariance[3][3] += _PACE_WANDER * self._noise
        for j, (value, x) in enumerate(zip(self.coefficients, sample, strict=True)):
            size = max(value, MIN_TERM * whole / x) if x else value
            variance = size * size
            if covariance[j][j] < MAX_SPREAD * MAX_SPREAD * variance:
                covariance[j][j] += self._noise * WANDER * WANDER * variance

    def _correct(self, slopes: Vector, error: float) -> float:
        """Update on a relative `error`, of which it gives the variance expected.

        `slopes` are its derivatives by the state.
        """
        covariance = self._covariance
        towards = [sum(map(mul, row, slopes)) for row in covariance]
        # Rounding must not make it negative.
        variance = max(0.0, sum(map(mul, towards, slopes))) + self._noise
        limit = max(MAX_ERROR, MAX_DEVIATIONS * math.sqrt(variance))
        step = max(-limit, min(limit, error)) / variance
        state = (*self.coefficients, self._log_pace)
        moved = [x + step * t for x, t in zip(state, towards, strict=True)]
        self.coefficients = [max(0.0, value) for value in moved[:3]]
        self._log_pace = max(-_MAX_LOG_PACE, min(_MAX_LOG_PACE, moved[3]))
        for i, row in enumerate(covariance):
            share = towards[i] / variance
            covariance[i] = [v - share * t for v, t in zip(row, towards, strict=True)]
        # Rounding makes it lopsided, and what is lopsided grows until it explodes.
        for i in range(_SIZE):
            for j in range(i):
                covariance[i][j] = covariance[j][i]
        return variance


def _share_of_step(samples: Sequence[Sample], j: int) -> float:
    """The coefficient `j` with which its term alone would be a mean step; 0 if none."""
    mean = sum(sample[j] for sample in samples) / len(samples)
    return 1 / mean if mean else 0.0
