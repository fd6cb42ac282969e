"""The shared-prefix kernel against float64, under the Triton interpreter.

Partial buffers hold NaN beforehand, and so does every KV slot no row owns: a partial
that is not written, or a key that should not be read, shows in the output.
"""

from __future__ import annotations

import math

import pytest
import torch
from trees import Case, group, make_case, relative_error, tree

from sglang_taper.errors import FieldError
from sglang_taper.ops.reference import reference_decode
from sglang_taper.ops.segments import StepLayout
from sglang_taper.ops.triton_decode import (
    AttentionShape,
    DecodeBuffers,
    decode,
    make_plan,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}


def buffers_for(case: Case, max_rows: int = 0, **options: int) -> DecodeBuffers:
    q_heads, dim = case.q.shape[1:]
    kv_heads, v_dim = case.v_pool.shape[1:]
    rows = max_rows or len(case.q)
    shape = AttentionShape(q_heads, kv_heads, dim, v_dim)
    return DecodeBuffers(shape, case.q.dtype, "cpu", max_rows=rows, **options)


def run(
    case: Case, buffers: DecodeBuffers, soft_cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    buffers.partial_out.fill_(torch.nan)
    buffers.partial_lse.fill_(torch.nan)
    plan = make_plan(
        case.layout, case.req_to_token, case.req_pool_indices, buffers=buffers
    )
    scale = 1 / math.sqrt(case.q.shape[2])
    return decode(plan, case.q, case.k_pool, case.v_pool, scale, soft_cap)


def check(case: Case, buffers: DecodeBuffers, soft_cap: float = 0.0) -> None:
    out, lse = run(case, buffers, soft_cap)
    truth, true_lse = reference_decode(
        case.q,
        case.k_pool,
        case.v_pool,
        case.slots,
        1 / math.sqrt(case.q.shape[2]),
        soft_cap,
    )
    assert relative_error(out, truth) < TOLERANCE[case.q.dtype]
    empty = torch.isinf(true_lse)
    assert torch.equal(torch.isinf(lse), empty)
    assert relative_error(lse[~empty], true_lse[~empty]) < TOLERANCE[case.q.dtype]


# Every value of each axis, and the pairs that differ in kind.
GRID = [
    (1, 0, 1, 1),
    (1, 1000, 17, 4),
    (2, 1, 2, 3),
    (2, 63, 17, 8),
    (2, 1000, 1, 1),
    (3, 64, 1, 4),
    (3, 0, 17, 3),
    (3, 65, 2, 8),
    (8, 0, 2, 1),
    (8, 1, 17, 4),
    (8, 63, 1, 3),
    (8, 1000, 2, 8),
    (33, 64, 17, 1),
    (33, 65, 1, 3),
    (33, 1, 2, 8),
    (33, 1000, 17, 4),
]


@pytest.mark.parametrize(("width", "prefix", "private", "ratio"), GRID)
def test_a_group_equals_its_rows_alone(
    width: int, prefix: int, private: int, ratio: int
) -> None:
    layout = group(width, prefix, private)
    dtype = torch.float16 if prefix in (64, 1000) else torch.float32
    case = make_case(layout, heads=(2 * ratio, 2), dtype=dtype, seed=width)
    check(case, buffers_for(case))


# Rows 0 to 4 share, of which 0 to 2 share more, of which 0 and 2 still more; 5 and 7
# are another group; 6 shares nothing; 8 is padding.
DEEP = tree(
    ([0, 2, 1, 4, 3], 0, 70),
    ([0, 2, 1], 70, 75),
    ([2, 0], 75, 300),
    ([7, 5], 0, 33),
    lens=[301, 75 + 1, 317, 71, 72, 34, 40, 50, 0],
)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_tree_of_any_depth_with_ungrouped_and_padding_rows(page_size: int) -> None:
    # shared lengths of whole pages, as slots are only shared so
    segments = [
        (s.rows, s.start // page_size * page_size, s.end // page_size * page_size)
        for s in DEEP.segments
    ]
    layout = tree(*(s for s in segments if s[1] < s[2]), lens=DEEP.seq_lens)
    case = make_case(layout, heads=(6, 2), page_size=page_size)
    out, lse = run(case, buffers_for(case))
    check(case, buffers_for(case))
    assert (out[8] == 0).all()
    assert (lse[8] == -torch.inf).all()


@pytest.mark.parametrize("dims", [(32, 16), (80, 80), (48, 64)])
def test_head_dims_need_not_be_equal_nor_powers_of_two(dims: tuple[int, int]) -> None:
    case = make_case(DEEP, heads=(4, 1), dims=dims)
    check(case, buffers_for(case))


def test_the_soft_cap_is_applied_before_the_softmax() -> None:
    case = make_case(DEEP, heads=(4, 2))
    check(case._replace(q=case.q * 20), buffers_for(case), soft_cap=5.0)


def test_a_ratio_above_the_small_tile_uses_the_large_one_for_a_single_row() -> None:
    case = make_case(tree(([0, 1], 0, 20), lens=[21, 25, 9]), heads=(70, 1))
    check(case, buffers_for(case))


def test_logits_far_below_zero_do_not_underflow_to_nan() -> None:
    case = make_case(DEEP)
    case.k_pool.abs_()
    check(case._replace(q=case.q.abs() * -200), buffers_for(case))


def test_changed_groups_on_the_same_buffers_leave_nothing_behind() -> None:
    layouts = [DEEP, group(9, 130, 3), group(2, 1000, 5), group(9, 0, 1), DEEP]
    buffers = buffers_for(make_case(DEEP), max_rows=9)
    for seed, layout in enumerate(layouts):
        check(make_case(layout, seed=seed), buffers)


def test_private_parts_grow_while_the_group_stays() -> None:
    buffers = buffers_for(make_case(DEEP))
    for step in range(3):
        lens = tuple(n + step * bool(n) for n in DEEP.seq_lens)
        check(make_case(StepLayout(DEEP.segments, lens), seed=step), buffers)


@pytest.mark.parametrize("num_programs", [1, 2, 61])
def test_programs_beyond_the_work_do_nothing(num_programs: int) -> None:
    case = make_case(group(3, 200, 2))
    check(case, buffers_for(case, num_programs=num_programs))


def test_rows_beyond_the_layout_are_empty() -> None:
    case = make_case(group(3, 20, 2))
    extra = torch.zeros(2, dtype=torch.int64)
    padded = case._replace(
        q=torch.cat([case.q, case.q[:2]]),
        req_pool_indices=torch.cat([case.req_pool_indices, extra]),
    )
    out, lse = run(padded, buffers_for(padded, max_rows=8))
    expected, _ = run(case, buffers_for(case))
    assert torch.equal(out[:3], expected)
    assert (out[3:] == 0).all()
    assert (lse[3:] == -torch.inf).all()


def test_queries_and_pools_may_be_views_with_gaps() -> None:
    case = make_case(DEEP, heads=(4, 2))
    wide = torch.cat([case.q, case.q + 1], 1)[:, :4]
    both = torch.stack([case.k_pool, case.v_pool], 1)
    views = case._replace(q=wide, k_pool=both[:, 0], v_pool=both[:, 1])
    assert not wide.is_contiguous()
    check(views, buffers_for(case))


def test_tensors_of_another_shape_or_type_are_refused() -> None:
    case = make_case(group(2, 5, 1))
    buffers = buffers_for(case)
    with pytest.raises(FieldError, match="q="):
        run(case._replace(q=case.q.half()), buffers)
    with pytest.raises(FieldError, match="k_pool="):
        run(case._replace(k_pool=case.k_pool[:, :1]), buffers)
    with pytest.raises(FieldError, match="req_pool_indices=1"):
        run(case._replace(req_pool_indices=torch.tensor([0])), buffers)
    with pytest.raises(FieldError, match="req_to_token="):
        run(case._replace(req_to_token=case.req_to_token.long()), buffers)
