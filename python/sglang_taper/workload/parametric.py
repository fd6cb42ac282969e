"""Request shapes drawn from a few parameters, when no file of real ones is given."""

from __future__ import annotations

import math
import random

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.workload.shape import Path, Phase, RequestShape, make_shape


class ShapeParams(msgspec.Struct, frozen=True):
    """Distributions of request shapes.

    A share `pdr` of the requests forks. Serial answers have a mean of `serial_tokens`,
    forking ones `decomposable_factor` times that, of which a share `pts` is in
    branches: `stages` forks one after the other of `fan_out` branches each (both
    ranges uniform, ends included). Lengths are lognormal with the coefficients of
    variation `prompt_cv`, `serial_cv` (answers as a whole) and `branch_cv` (branches
    of one fork). With `depth` 2 and more a branch forks again in its middle, with two
    branches per level.
    """

    pdr: float = 0.5
    pts: float = 0.8
    fan_out: tuple[int, int] = (2, 12)
    stages: tuple[int, int] = (1, 3)
    depth: int = 1
    branch_cv: float = 0.5
    prompt_tokens: float = 150.0
    prompt_cv: float = 0.6
    serial_tokens: float = 200.0
    serial_cv: float = 0.6
    decomposable_factor: float = 3.0

    def __post_init__(self) -> None:
        for name in ("pdr", "pts"):
            if not 0 <= getattr(self, name) <= 1:
                raise FieldError(name, getattr(self, name), "at least 0, at most 1")
        for name in ("fan_out", "stages"):
            low, high = getattr(self, name)
            if not 1 <= low <= high <= 4096:
                accepted = "LOW-HIGH with 1 <= LOW <= HIGH <= 4096"
                raise FieldError(name, f"{low}-{high}", accepted)
        for name in ("prompt_tokens", "serial_tokens", "decomposable_factor", "depth"):
            if not 0 < getattr(self, name) <= 1e6:
                raise FieldError(name, getattr(self, name), "above 0, at most 1e6")
        for name in ("branch_cv", "prompt_cv", "serial_cv"):
            if not 0 <= getattr(self, name) <= 10:
                raise FieldError(name, getattr(self, name), "at least 0, at most 10")


def draw_shape(params: ShapeParams, rng: random.Random) -> RequestShape:
    """One request; `rng` is advanced."""
    prompt = max(1, round(lognormal(params.prompt_tokens, params.prompt_cv, rng)))
    is_wide = rng.random() < params.pdr
    mean = params.serial_tokens * (params.decomposable_factor if is_wide else 1)
    total = max(1, round(lognormal(mean, params.serial_cv, rng)))
    if not is_wide:
        return make_shape(prompt, (total,))
    return make_shape(prompt, _wide_phases(params, total, rng))


def _wide_phases(params: ShapeParams, total: int, rng: random.Random) -> Path:
    """Serial, fork, serial, ...: `stages` forks with text before, between and after."""
    num_stages = rng.randint(*params.stages)
    serial = max(num_stages + 1, round((1 - params.pts) * total))
    texts = _split(serial, [1.0] * (num_stages + 1))
    branch_tokens = _split(max(0, total - serial), [1.0] * num_stages)
    phases: list[Phase] = []
    for text, tokens in zip(texts, branch_tokens, strict=False):
        fan_out = rng.randint(*params.fan_out)
        weights = [lognormal(1.0, params.branch_cv, rng) for _ in range(fan_out)]
        lengths = _split(tokens, weights)
        fork = tuple(_branch(length, params.depth) for length in lengths)
        phases += [text, fork]
    return (*phases, texts[-1])


def _branch(tokens: int, depth: int) -> Path:
    """`tokens` in one branch, which forks again while `depth` and its length allow."""
    if depth <= 1 or tokens < 6:
        return (tokens,)
    ends = tokens // 3
    inner = [(tokens - 2 * ends) // 2, (tokens - 2 * ends + 1) // 2]
    return (ends, tuple(_branch(part, depth - 1) for part in inner), ends)


def _split(total: int, weights: list[float]) -> list[int]:
    """`total` in proportion to `weights`, each part at least 1."""
    whole, spent, parts = sum(weights), 0.0, []
    for weight in weights:
        before = round(total * spent / whole)
        spent += weight
        parts.append(max(1, round(total * spent / whole) - before))
    return parts


def lognormal(mean: float, cv: float, rng: random.Random) -> float:
    """A positive number with this mean and coefficient of variation."""
    variance = math.log1p(cv * cv)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
