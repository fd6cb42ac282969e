"""Coefficients of `T = a + b*rows + c*kv_tokens` from steps that were timed.

Least squares on relative errors, never negative, robust against steps that took many
times too long. Used by the online model and by `sglang-taper calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from operator import mul

# Pull towards 0, as a share of a well-determined direction's weight: next to nothing,
# but directions that the steps do not determine need some.
RIDGE = 1e-9
# Samples off by this many times the median error are left out of the fit.
OUTLIER_FACTOR, OUTLIER_FLOOR = 4.0, 0.005

Vector = list[float]
# Prefill passes that tell what one costs.
MIN_PASSES = 4
# (1, rows, kv_tokens) / T of a step: the target of every prediction is 1.
Sample = tuple[float, float, float]
_SUBSETS = [s for size in (3, 2, 1) for s in combinations(range(3), size)]


def sample_of(rows: int, kv_tokens: int, step_ms: float) -> Sample:
    """A step as the fit sees it; `rows` rounded up to a graph bucket, if any."""
    return (1 / step_ms, rows / step_ms, kv_tokens / step_ms)


def robust_fit(samples: list[Sample]) -> Vector:
    """`[a, b, c]` for `samples` (at least one), without those far off the others."""
    fitted = _fit(samples)
    errors = [abs(dot(fitted, sample) - 1) for sample in samples]
    limit = OUTLIER_FACTOR * sorted(errors)[len(errors) // 2]
    limit = max(limit, OUTLIER_FLOOR)
    kept = [s for s, error in zip(samples, errors, strict=True) if error <= limit]
    return _fit(kept) if len(kept) < len(samples) else fitted


def fit_prefill(passes: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """`(a_ms, ms_per_token)` of a prefill pass, from (new tokens, ms) of some.

    None from fewer than `MIN_PASSES` that computed anything.
    """
    samples = [sample_of(n, 0, pass_ms) for n, pass_ms in passes if n and pass_ms > 0]
    if len(samples) < MIN_PASSES:
        return None
    a_ms, ms_per_token, _ = robust_fit(samples)
    return a_ms, ms_per_token


def dot(x: Sequence[float], y: Sequence[float]) -> float:
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2]


def _fit(samples: list[Sample]) -> Vector:
    """Non-negative least squares of `coefficients . sample = 1`.

    Each variable is scaled to mean square 1, so the ridge means the same for a row
    and for a token. The coefficient of one that is 0 throughout is 0.
    """
    count, columns = len(samples), list(zip(*samples, strict=True))
    scale = [math.sqrt(sum(map(mul, x, x)) / count) for x in columns]
    used = [j for j in range(3) if scale[j] > 0]
    gram = [[0.0] * 3 for _ in range(3)]
    target = [0.0] * 3
    for j in used:
        target[j] = sum(columns[j]) / count / scale[j]
        for k in used:
            products = sum(map(mul, columns[j], columns[k]))
            gram[j][k] = products / count / scale[j] / scale[k]
        gram[j][j] += RIDGE
    solution = non_negative(gram, target, used)
    return [solution[j] / scale[j] if j in used else 0.0 for j in range(3)]


def non_negative(gram: list[Vector], target: Vector, used: list[int]) -> Vector:
    """Minimum of x.gram.x - 2 x.target over x >= 0, by trying every active set.

    With every entry of the active set solved for, the objective is -x.target. If no
    bound is active the first set tried is the minimum.
    """
    best, best_gain = [0.0] * 3, 0.0
    for active in _SUBSETS:
        if not set(active) <= set(used):
            continue
        x = _solve(gram, target, active)
        gain = dot(x, target)
        if min(x) >= 0 and gain > best_gain:
            best, best_gain = x, gain
            if len(active) == len(used):
                break
    return best


def _solve(gram: list[Vector], target: Vector, active: Sequence[int]) -> Vector:
    """Solve the positive definite system restricted to `active`; 0 elsewhere."""
    rows = [[gram[j][k] for k in active] + [target[j]] for j in active]
    size = len(rows)
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for k in range(pivot, size + 1):
                rows[below][k] -= factor * rows[pivot][k]
    x = [0.0] * 3
    for i in reversed(range(size)):
        known = sum(rows[i][k] * x[active[k]] for k in range(i + 1, size))
        x[active[i]] = (rows[i][size] - known) / rows[i][i]
    return x
