"""Random decode steps over trees of shared prefixes, with KV in scattered slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_taper.ops.segments import Segment, StepLayout

GARBAGE_SLOT = 0


class Case(NamedTuple):
    """A step as the backends take it, and the slots of each row for the reference."""

    layout: StepLayout
    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    slots: list[torch.Tensor]


def group(width: int, prefix: int, private: int, first_row: int = 0) -> StepLayout:
    """One group over one prefix (no segment if there is nothing to share)."""
    rows = tuple(range(first_row, first_row + width))
    segments = (Segment(rows, 0, prefix),) if prefix and width > 1 else ()
    return StepLayout(segments, (prefix + private,) * width)


def make_case(
    layout: StepLayout,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    *,
    dtype: torch.dtype = torch.float32,
    page_size: int = 1,
    seed: int = 0,
) -> Case:
    """Random data for `layout`; what no row owns is NaN in the pools.

    Pages are permuted; rows of a segment share the slots of its tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, longest = len(layout.seq_lens), max(layout.seq_lens)
    pages = -(-longest // page_size) * rows + 1
    free = iter((torch.randperm(pages, generator=generator) + 1).tolist())
    table = torch.full((rows + 3, longest + page_size), GARBAGE_SLOT, dtype=torch.int32)
    pool_rows = torch.randperm(rows + 3, generator=generator)[:rows]
    for row, length in enumerate(layout.seq_lens):
        count = -(-length // page_size)
        first = torch.tensor([next(free) * page_size for _ in range(count)])
        tokens = (
            (first[:, None] + torch.arange(page_size)).flatten() if count else first
        )
        table[pool_rows[row], :length] = tokens[:length].int()
    for segment in layout.segments:
        shared = table[pool_rows[segment.rows[0]], segment.start : segment.end].clone()
        for row in segment.rows:
            table[pool_rows[row], segment.start : segment.end] = shared
    slots = [
        table[pool_rows[row], :length].long()
        for row, length in enumerate(layout.seq_lens)
    ]
    used = torch.cat(slots).unique()
    pools = []
    for dim in dims:
        pool = torch.full(((pages + 2) * page_size, heads[1], dim), torch.nan)
        pool[used] = torch.randn(len(used), heads[1], dim, generator=generator)
        pools.append(pool.to(dtype))
    q = torch.randn(rows, heads[0], dims[0], generator=generator).to(dtype)
    return Case(layout, q, *pools, table, pool_rows, slots)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN is infinite."""
    difference = (actual.double() - expected.double()).norm()
    error = float(difference / expected.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def tree(*segments: tuple[Sequence[int], int, int], lens: Sequence[int]) -> StepLayout:
    """A layout from plain tuples (rows, start, end)."""
    return StepLayout(
        tuple(Segment(tuple(r), a, b) for r, a, b in segments), tuple(lens)
    )
