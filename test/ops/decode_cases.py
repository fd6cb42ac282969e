"""Decode steps over a paged pool with known sharing, and how a backend is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_taper.ops.reference import reference_decode
from sglang_taper.ops.segments import Segment, StepLayout

# relative error against float64, of the whole output
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}


class Shape(NamedTuple):
    kv_heads: int = 3
    group: int = 3  # query heads per KV head
    head_dim: int = 64
    value_dim: int = 64


class Step(NamedTuple):
    """A decode step: inputs of a backend, and the slots of every row."""

    layout: StepLayout
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    slots: list[Tensor]

    def planned(self, make_plan: Callable[..., Any]) -> Any:
        return make_plan(
            self.layout, self.req_to_token, self.req_pool_indices, dtype=self.q.dtype
        )


def group_layout(*groups: tuple[int, int], private: int) -> StepLayout:
    """Groups `(width, prefix length)` of adjacent rows, rows with private tokens."""
    segments, lens = [], []
    for width, prefix in groups:
        rows = tuple(range(len(lens), len(lens) + width))
        segments.append(Segment(rows, 0, prefix))
        lens += [prefix + private] * width
    return StepLayout(tuple(segments), tuple(lens))


def make_step(
    layout: StepLayout,
    shape: Shape = Shape(),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    *,
    permuted: bool = True,
    seed: int = 0,
) -> Step:
    """A pool in which the layout holds; slots in random order unless not `permuted`.

    Slots of nobody hold infinities: reading one shows.
    """
    random = torch.Generator().manual_seed(seed)
    slots, num_slots = _slots(layout, permuted, random)
    num_rows = len(slots)
    pools = []
    for dim in (shape.head_dim, shape.value_dim):
        pool = torch.randn(num_slots + 8, shape.kv_heads, dim, generator=random)
        pool[num_slots:] = torch.inf
        pools.append(pool.to(dtype))
    heads = shape.kv_heads * shape.group
    q = torch.randn(num_rows, heads, shape.head_dim, generator=random).to(dtype)
    indices = torch.randperm(num_rows + 3, generator=random)[:num_rows]
    width = max((len(row) for row in slots), default=0) + 5
    table = torch.full((num_rows + 3, width), num_slots, dtype=torch.int32)
    for index, row in zip(indices, slots, strict=True):
        table[index, : len(row)] = row.int()
    return Step(layout, q, *pools, table, indices, slots)


def _slots(
    layout: StepLayout, permuted: bool, random: torch.Generator
) -> tuple[list[Tensor], int]:
    rows: list[list[Tensor]] = [[] for _ in layout.seq_lens]
    used = 0
    for segment in layout.segments:
        shared = torch.arange(used, used + segment.end - segment.start)
        used += len(shared)
        for row in segment.rows:
            rows[row].append(shared)
    for row, length in zip(rows, layout.seq_lens, strict=True):
        own = length - sum(map(len, row))
        row.append(torch.arange(used, used + own))
        used += own
    order = torch.randperm(used, generator=random) if permuted else torch.arange(used)
    return [order[torch.cat(row)] for row in rows], used


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of the truth; infinite where not finite."""
    difference = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return float(difference.nan_to_num(torch.inf))


def check_result(step: Step, result: tuple[Tensor, Tensor], **options: float) -> None:
    """Compare out and lse of a backend with the truth; `options` as given to it."""
    scale = options.get("scale", scale_of(step.q))
    truth = (step.q, step.k_pool, step.v_pool, step.slots, scale)
    out, lse = reference_decode(*truth, options.get("soft_cap", 0.0))
    assert result[0].dtype == step.q.dtype
    assert result[1].dtype == torch.float32
    assert relative_error(result[0], out) < TOLERANCE[step.q.dtype]
    empty = torch.isinf(lse)
    assert torch.equal(torch.isinf(result[1]), empty)
    assert torch.all(result[0][empty] == 0)
    if not empty.all():
        error = (result[1].double() - lse)[~empty].abs().max()
        assert error < 10 * TOLERANCE[step.q.dtype]


def scale_of(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def random_tree(
    draw: Callable[[int, int], int], rows: Sequence[int], depth: int, start: int = 0
) -> list[Segment]:
    """Segments over `rows` that fork up to `depth` times; `draw(low, high)` decides."""
    if not rows or depth == 0:
        return []
    end = start + draw(0, 70)
    cut = draw(0, len(rows))
    below = [rows[:cut], rows[cut:]] if draw(0, 3) else []  # else the rows end here
    children = [s for part in below for s in random_tree(draw, part, depth - 1, end)]
    return [Segment(tuple(rows), start, end), *children]
