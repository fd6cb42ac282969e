"""Which batches to show, in which order, and how long one is going to take. Pure.

The order covers the whole plane of rows and contexts early, so that a run that is cut
short by its budget, or by its user, has seen something of everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_taper.policy.latency_fit import robust_fit, sample_of
from sglang_taper.probe import Cell, Limits, cells_within

FIRST_CONTEXT, CONTEXT_FACTOR = 16, 4
MAX_ROWS = 512
# Cells after which the time of the next one is predicted from theirs.
NUM_FIRST = 3


def make_grid(limits: Limits, num_steps: int) -> list[Cell]:
    """All cells that the server can hold, best first."""
    rows = _row_counts(min(limits.max_rows, MAX_ROWS))
    contexts, context = [], FIRST_CONTEXT
    while context <= limits.max_tokens:
        contexts.append(context)
        context *= CONTEXT_FACTOR
    cells = [Cell(num_rows, num_tokens) for num_rows in rows for num_tokens in contexts]
    return in_order(cells_within(cells, num_steps, limits))


def _row_counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and `most`."""
    powers = [2**k for k in range(most.bit_length())]
    between = [3 * power for power in powers]
    return sorted({n for n in (*powers, *between, most) if n <= most})


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Small ones that tell rows from context; then always the one farthest, in ratios,
    from those before."""
    left = sorted(cells, key=lambda cell: (cell.prompt_tokens, cell.num_rows))
    chosen = [cell for cell in _first_of(left) if cell in left]
    left = [cell for cell in left if cell not in chosen]
    while left:
        farthest = max(left, key=lambda cell: min(_distance(cell, c) for c in chosen))
        chosen.append(farthest)
        left.remove(farthest)
    return chosen


def _first_of(cells: list[Cell]) -> list[Cell]:
    """The smallest cell, one with more rows and one with a longer context."""
    if not cells:
        return []
    smallest = cells[0]
    wide = [c for c in cells if c.num_tokens == smallest.num_tokens]
    long = [c for c in cells if c.num_rows == smallest.num_rows]
    picked = [smallest, wide[len(wide) // 2], long[len(long) // 3]]
    return list(dict.fromkeys(picked))


def _distance(one: Cell, other: Cell) -> float:
    rows = math.log(one.num_rows / other.num_rows)
    context = math.log(one.num_tokens / other.num_tokens)
    return math.hypot(rows, context)


def predicted_s(cell: Cell, shown: Sequence[tuple[Cell, float]]) -> float:
    """Seconds that `cell` will take, from those `shown` took; 0 before the third."""
    if len(shown) < NUM_FIRST:
        return 0.0
    samples = [sample_of(c.num_rows, c.prompt_tokens, s) for c, s in shown]
    a_s, b_s, c_s = robust_fit(samples)
    return a_s + b_s * cell.num_rows + c_s * cell.prompt_tokens
