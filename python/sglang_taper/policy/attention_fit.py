"""The constants of the attention gate, from timings of both modes.

Least squares on relative errors. The three rates enter through maxima, so they are
searched by steps that shrink; for each choice the three additive costs are linear, and
solved exactly (never negative).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.policy.attention_gate import (
    AttentionConstants,
    LayerShape,
    StepShape,
    predict_cascade_us,
    predict_plain_us,
)
from sglang_taper.policy.latency_fit import non_negative

MIN_TIMINGS = 4
# Rates are searched in factors from e down to 0.01 %.
FIRST_STEP, LAST_STEP = 1.0, 1e-4
# Timings of one batch size do not tell the two extra costs apart.
RIDGE = 1e-9

Rates = tuple[float, float, float]  # logs: DRAM bytes, cached over DRAM, FLOP


class AttentionTiming(msgspec.Struct, frozen=True):
    """Attention of one layer for a step, measured in both modes."""

    step: StepShape
    plain_us: float
    cascade_us: float


def fit_constants(
    timings: Sequence[AttentionTiming], shape: LayerShape
) -> AttentionConstants:
    """Constants that predict the timings best, with their error on them.

    A rate that no timing depends on stays at the highest that was seen, so vary
    widths, shared and private lengths. Raises FieldError for fewer than four timings
    or one that is not positive.
    """
    if len(timings) < MIN_TIMINGS:
        accepted = f"at least {MIN_TIMINGS} timings"
        raise FieldError("timings", len(timings), accepted)
    for index, timing in enumerate(timings):
        if not 0 < min(timing.plain_us, timing.cascade_us) < math.inf:
            raise FieldError(f"timings[{index}]", timing, "finite times above 0")
    rates = _search(timings, shape)
    best, _ = _with_rates(rates, timings, shape)
    errors = [_ratio_error(best, shape, timing) for timing in timings]
    return msgspec.structs.replace(best, error=max(errors))


def _search(timings: Sequence[AttentionTiming], shape: LayerShape) -> Rates:
    rates = _first_rates(timings, shape)
    _, loss = _with_rates(rates, timings, shape)
    step = FIRST_STEP
    while step > LAST_STEP:
        for candidate in _neighbours(rates, step):
            _, candidate_loss = _with_rates(candidate, timings, shape)
            if candidate_loss < loss * (1 - 1e-9):
                rates, loss = candidate, candidate_loss
                break
        else:
            step /= 2
    return rates


def _neighbours(rates: Rates, step: float) -> list[Rates]:
    """One or two rates changed: the rates of memory and cache pull on each other."""
    moves = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (1, 1, 0)]
    dram, ratio, flop = rates
    return [
        (dram + sign * a, max(ratio + sign * b, 0.0), flop + sign * c)
        for a, b, c in moves
        for sign in (step, -step)
    ]


def _first_rates(timings: Sequence[AttentionTiming], shape: LayerShape) -> Rates:
    """The highest rates seen, which are not above the true ones."""
    dram, flop = [], []
    for timing in timings:
        tokens = sum(s.num_tokens for s in timing.step.segments)
        tokens += timing.step.private_tokens
        dram.append(shape.kv_bytes_per_token * tokens / timing.cascade_us)
        flop.append(shape.cascade_flop(timing.step) / timing.cascade_us)
    return math.log(max(*dram, 1.0)), 0.0, math.log(max(*flop, 1.0))


def _with_rates(
    rates: Rates, timings: Sequence[AttentionTiming], shape: LayerShape
) -> tuple[AttentionConstants, float]:
    """Constants with the best additive costs for `rates`, and their loss."""
    dram = math.exp(rates[0])
    reading = AttentionConstants(
        dram_bytes_per_us=dram,
        cached_bytes_per_us=max(dram, dram * math.exp(rates[1])),
        flop_per_us=math.exp(rates[2]),
        base_us=0.0,
        extra_us=0.0,
        extra_us_per_row=0.0,
        error=0.0,
    )
    rows, targets = [], []
    for timing in timings:
        for predict, measured, extra in (
            (predict_plain_us, timing.plain_us, 0),
            (predict_cascade_us, timing.cascade_us, 1),
        ):
            features = (1.0, float(extra), float(extra * timing.step.num_rows))
            rows.append([feature / measured for feature in features])
            targets.append(1 - predict(reading, shape, timing.step) / measured)
    costs, loss = _non_negative_least_squares(rows, targets)
    base, extra_us, per_row = costs
    fitted = msgspec.structs.replace(
        reading, base_us=base, extra_us=extra_us, extra_us_per_row=per_row
    )
    return fitted, loss


def _non_negative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> tuple[list[float], float]:
    """x >= 0 that minimises the squared distance of rows . x from targets."""
    columns = list(zip(*rows, strict=True))
    gram = [[_dot(a, b) for b in columns] for a in columns]
    goal = [_dot(column, targets) for column in columns]
    used = [j for j in range(len(columns)) if gram[j][j] > 0]
    for j in used:
        gram[j][j] *= 1 + RIDGE
    x = non_negative(gram, goal, used)
    loss = sum((_dot(row, x) - t) ** 2 for row, t in zip(rows, targets, strict=True))
    return x, loss


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(mul, a, b))


def _ratio_error(
    constants: AttentionConstants, shape: LayerShape, timing: AttentionTiming
) -> float:
    predicted = predict_cascade_us(constants, shape, timing.step)
    predicted /= predict_plain_us(constants, shape, timing.step)
    return abs(predicted * timing.plain_us / timing.cascade_us - 1)
