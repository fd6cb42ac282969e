"""The merge of two levels alone: empty parts, masks, order, both bases."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_taper.kernels.two_levels import merge_levels

HEADS, DIM, BLOCK = 5, 24, 2


def merge(
    shared: tuple[torch.Tensor, torch.Tensor],
    private: tuple[torch.Tensor, torch.Tensor],
    shared_row: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(private[0], torch.nan)
    lse = torch.full_like(private[1], torch.nan)
    grid = (len(shared_row), -(-HEADS // BLOCK))
    merge_levels[grid](
        *shared,
        *private,
        torch.tensor(shared_row, dtype=torch.int32),
        out,
        lse,
        NUM_Q_HEADS=HEADS,
        HEAD_DIM=DIM,
        BLOCK_D=32,
        BLOCK_H=BLOCK,
    )
    return out, lse


def states(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, HEADS, DIM, generator=generator)
    return out, torch.randn(rows, HEADS, generator=generator) * 30


def test_rows_find_their_shared_part_wherever_it_is() -> None:
    shared, private = states(4, 1), states(4, 2)
    order = [2, -1, 0, 3]
    out, lse = merge(shared, private, order)
    for row, source in enumerate(order):
        parts = [(private, row)] + [(shared, source)] * (source >= 0)
        logs = torch.stack([p[1][i] for p, i in parts]).double() * math.log(2)
        weights = logs.softmax(0)[..., None]
        expected = (weights * torch.stack([p[0][i] for p, i in parts])).sum(0)
        assert torch.allclose(out[row].double(), expected, atol=1e-6)
        assert torch.allclose(lse[row].double(), logs.logsumexp(0), atol=1e-5)


@pytest.mark.parametrize("infinity", [-math.inf, math.inf])
def test_an_empty_part_weighs_nothing_whatever_its_output_holds(
    infinity: float,
) -> None:
    shared, private = states(3, 1), states(3, 2)
    shared[1][0], shared[0][0] = infinity, torch.nan
    private[1][1], private[0][1] = infinity, torch.nan
    for part in (shared, private):
        part[1][2], part[0][2] = infinity, torch.nan
    out, lse = merge(shared, private, [0, 1, 2])
    assert torch.allclose(out[0], private[0][0])
    assert torch.allclose(out[1], shared[0][1])
    assert torch.allclose(lse[0], private[1][0] * math.log(2))
    assert torch.allclose(lse[1], shared[1][1] * math.log(2))
    assert (out[2] == 0).all()
    assert (lse[2] == -math.inf).all()
