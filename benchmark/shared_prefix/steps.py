"""Decode steps over shared prefixes, and data for them.

Slots are laid out as a server hands them out: prefixes one after the other, private
tokens step by step over the rows. `scattered` permutes them instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from sglang_taper.ops.segments import Segment, StepLayout


class Heads(NamedTuple):
    """A layer's query heads, KV heads and head dimension."""

    num_q: int
    num_kv: int
    dim: int

    @property
    def label(self) -> str:
        return f"{self.num_q}/{self.num_kv}/{self.dim}"

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)


class Cell(NamedTuple):
    """`groups` groups of `width` rows over a prefix, each with private tokens."""

    groups: int
    width: int
    prefix: int
    private: int

    @property
    def layout(self) -> StepLayout:
        rows = [range(g * self.width, (g + 1) * self.width) for g in range(self.groups)]
        shares = self.width > 1 and self.prefix > 0
        segments = [Segment(tuple(r), 0, self.prefix) for r in rows] if shares else []
        length = self.prefix + self.private
        return StepLayout(tuple(segments), (length,) * (self.groups * self.width))

    @property
    def label(self) -> str:
        return f"{self.groups}x{self.width} P={self.prefix} s={self.private}"


class Step(NamedTuple):
    """A layout and where its KV lies, on the device."""

    layout: StepLayout
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    num_slots: int

    @property
    def rows(self) -> int:
        return len(self.layout.seq_lens)

    def slots(self, row: int) -> torch.Tensor:
        return self.req_to_token[row, : self.layout.seq_lens[row]]


def make_step(
    layout: StepLayout, device: torch.device, *, scattered: bool, seed: int = 0
) -> Step:
    """Slots 1.. for every token; rows of a segment have the same."""
    lens = np.array(layout.seq_lens)
    table = np.zeros((len(lens), max(int(lens.max()), 1)), np.int32)
    used = 1
    starts = np.zeros_like(lens)
    for segment in layout.segments:
        count = segment.end - segment.start
        for row in segment.rows:
            table[row, segment.start : segment.end] = np.arange(used, used + count)
            starts[row] = segment.end
        used += count
    for token in range(int(lens.max())):
        rows = np.flatnonzero((starts <= token) & (token < lens))
        table[rows, token] = np.arange(used, used + len(rows))
        used += len(rows)
    if scattered:
        order = np.random.default_rng(seed).permutation(used - 1) + 1
        table = np.concatenate([[0], order]).astype(np.int32)[table]
    indices = torch.arange(len(lens), device=device)
    return Step(layout, torch.from_numpy(table).to(device), indices, used)


def random_layout(rows: int, max_tokens: int, rng: np.random.Generator) -> StepLayout:
    """Groups of any width, rows without one, and padding rows, in any order."""
    left = rng.permutation(rows).tolist()
    segments, lens = [], [0] * rows
    while len(left) > 1 and rng.random() < 0.9:
        width = int(rng.integers(1, min(len(left), 20) + 1))
        members, left = left[:width], left[width:]
        prefix = int(rng.integers(1, max_tokens)) if width > 1 else 0
        if prefix:
            segments.append(Segment(tuple(members), 0, prefix))
        for row in members:
            lens[row] = prefix + int(rng.integers(1, 64))
    return StepLayout(tuple(segments), tuple(lens))


def tensors(
    heads: Heads, step: Step, dtype: torch.dtype, seed: int, layers: int = 1
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Queries and a pair of pools per layer."""
    device = step.req_to_token.device
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    pool = (step.num_slots, heads.num_kv, heads.dim)
    pools = [(randn(*pool), randn(*pool)) for _ in range(layers)]
    return randn(step.rows, heads.num_q, heads.dim), pools


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    error = float(difference / expected.double().norm())
    return error if error == error else float("inf")
