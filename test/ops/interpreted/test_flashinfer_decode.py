"""The FlashInfer composition without a GPU: real wrappers, imitated modules.

What is FlashInfer's own arithmetic is not tested here; planning, index arrays, the
order of rows, scales, and our two kernels are.
"""

from __future__ import annotations

import math

import fake_flashinfer
import pytest
import torch
from trees import Case, group, make_case, relative_error, tree

from sglang_taper.errors import FieldError
from sglang_taper.ops.flashinfer_decode import (
    FlashInferBuffers,
    SharedMemory,
    decode,
    make_plan,
)
from sglang_taper.ops.flashinfer_levels import FlashInferShape
from sglang_taper.ops.reference import reference_decode

SCALE = 0.3


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> list[fake_flashinfer.FakePrefill]:
    return fake_flashinfer.install(monkeypatch)


def buffers_for(
    case: Case, num_slots: int = 3, soft_cap: float = 0.0, max_tokens: int = 9000
) -> FlashInferBuffers:
    rows, heads, dim = case.q.shape
    kv_heads = case.k_pool.shape[1]
    shape = FlashInferShape(heads, kv_heads, dim, case.q.dtype, soft_cap)
    memory = SharedMemory(
        shape,
        torch.zeros(1024, dtype=torch.uint8),
        max_rows=rows + 1,
        max_shared_tokens=max_tokens,
        max_private_tokens=max_tokens,
    )
    return FlashInferBuffers(shape, memory, num_rows=rows, num_slots=num_slots)


def check(case: Case, buffers: FlashInferBuffers, soft_cap: float = 0.0) -> None:
    for lse in (buffers.memory.shared_lse, buffers.memory.private_lse):
        lse.fill_(torch.nan)
    plan = make_plan(
        case.layout, case.req_to_token, case.req_pool_indices, buffers=buffers
    )
    out, lse = decode(plan, case.q, case.k_pool, case.v_pool, SCALE, soft_cap)
    truth, true_lse = reference_decode(
        case.q, case.k_pool, case.v_pool, case.slots, SCALE, soft_cap
    )
    assert relative_error(out, truth) < 1e-6
    empty = torch.isinf(true_lse)
    assert torch.equal(torch.isneginf(lse), empty)
    assert relative_error(lse[~empty], true_lse[~empty]) < 1e-6


# A tree whose inner group is worth more than its root; a second group; an ungrouped
# row; a padding row. Rows of a group are not neighbours.
MIXED = tree(
    ([0, 2, 1, 4, 3], 0, 70),
    ([2, 4, 0], 70, 400),
    ([7, 5], 0, 33),
    lens=[401, 75, 417, 71, 402, 34, 40, 50, 0],
)


@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3), (72, 9)])
def test_groups_ungrouped_and_padding_rows_in_any_order(heads: tuple[int, int]) -> None:
    """Ratios on the CUDA cores and on the tensor cores; more than 64 heads."""
    case = make_case(MIXED, heads=heads)
    check(case, buffers_for(case))


@pytest.mark.parametrize("num_slots", [2, 3, 9])
def test_more_groups_than_slots_leaves_the_cheapest_private(num_slots: int) -> None:
    case = make_case(MIXED)
    check(case, buffers_for(case, num_slots))


def test_changed_groups_on_the_same_arrays_leave_nothing_behind() -> None:
    buffers = buffers_for(make_case(MIXED))
    layouts = [MIXED, group(9, 130, 3), group(9, 0, 1), group(9, 64, 2), MIXED]
    for seed, layout in enumerate(layouts):
        check(make_case(layout, seed=seed), buffers)


def test_the_first_level_is_planned_again_only_when_the_groups_change(
    modules: list[fake_flashinfer.FakePrefill],
) -> None:
    buffers = buffers_for(make_case(MIXED, heads=(4, 2)))
    level0 = modules[0]
    first = level0.num_plans
    for step, layout in enumerate([MIXED, MIXED, group(9, 30, 1), group(9, 30, 2)]):
        check(make_case(layout, seed=step), buffers)
    assert level0.num_plans == first + 2


def test_the_soft_cap_reaches_both_levels_and_can_not_change() -> None:
    case = make_case(MIXED)
    case = case._replace(q=case.q * 20)
    buffers = buffers_for(case, soft_cap=5.0)
    check(case, buffers, soft_cap=5.0)
    with pytest.raises(FieldError, match=r"soft_cap=0\.0"):
        check(case, buffers)


def test_rows_beyond_the_layout_are_empty() -> None:
    case = make_case(group(5, 20, 2))
    short = tree(([0, 1], 0, 20), lens=[22, 22, 22])
    plan = make_plan(
        short, case.req_to_token, case.req_pool_indices, buffers=buffers_for(case)
    )
    out, lse = decode(plan, case.q, case.k_pool, case.v_pool, SCALE)
    assert (out[3:] == 0).all()
    assert (lse[3:] == -math.inf).all()
    assert torch.isfinite(lse[:3]).all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    case = make_case(group(4, 50, 2))
    with pytest.raises(FieldError, match="num_slots=5"):
        buffers_for(case, num_slots=5)
    with pytest.raises(FieldError, match="shared tokens=50"):
        check(case, buffers_for(case, max_tokens=49))
    ungrouped = make_case(tree(lens=[30] * 4))
    with pytest.raises(FieldError, match="private tokens=120"):
        check(ungrouped, buffers_for(ungrouped, max_tokens=119))
    with pytest.raises(FieldError, match="req_pool_indices=3"):
        check(
            case._replace(req_pool_indices=case.req_pool_indices[:3]),
            buffers_for(case),
        )
