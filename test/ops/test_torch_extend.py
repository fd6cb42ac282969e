"""Prefill attention on the CPU against float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from decode_cases import TOLERANCE, Shape, make_step, relative_error

from sglang_taper.ops import torch_extend
from sglang_taper.ops.reference import reference_extend
from sglang_taper.ops.segments import Segment, StepLayout
from sglang_taper.ops.torch_extend import extend, make_extend_plan

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def check(
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    dtype: torch.dtype,
    *,
    shape: Shape = Shape(2, 3, 32, 32),  # noqa: B008
    permuted: bool = True,
    soft_cap: float = 0.0,
    segments: tuple[Segment, ...] = (),
) -> None:
    lens = tuple(map(sum, zip(prefix_lens, extend_lens, strict=True)))
    layout = StepLayout(segments, lens)
    step = make_step(layout, shape, dtype, permuted=permuted)
    heads = shape.kv_heads * shape.group
    random = torch.Generator().manual_seed(3)
    q = torch.randn(sum(extend_lens), heads, shape.head_dim, generator=random)
    q = q.to(dtype)
    plan = make_extend_plan(
        step.req_to_token, step.req_pool_indices, prefix_lens, extend_lens
    )
    out = extend(plan, q, step.k_pool, step.v_pool, 0.2, soft_cap)
    pools = (step.k_pool, step.v_pool, step.slots)
    expected, _ = reference_extend(q, *pools, prefix_lens, extend_lens, 0.2, soft_cap)
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


@BOTH
@pytest.mark.parametrize("num_new", [1, 2, 17, 255, 256, 257, 600])
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 1000])
def test_new_tokens_see_the_prefix_and_themselves(
    prefix: int, num_new: int, dtype: torch.dtype
) -> None:
    check([prefix], [num_new], dtype)


@BOTH
@pytest.mark.parametrize("permuted", [False, True], ids=["consecutive", "permuted"])
def test_rows_of_different_lengths_in_one_step(
    permuted: bool, dtype: torch.dtype
) -> None:
    check([0, 40, 500, 7, 0], [400, 1, 260, 0, 1], dtype, permuted=permuted)


@BOTH
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_any_ratio_of_heads(group: int, dtype: torch.dtype) -> None:
    check([100, 0], [30, 290], dtype, shape=Shape(2, group, 32, 32))


@BOTH
def test_siblings_extend_the_same_prefix(dtype: torch.dtype) -> None:
    check([90] * 3, [5, 1, 9], dtype, segments=(Segment((0, 1, 2), 0, 90),))


@BOTH
def test_values_of_another_size_and_soft_capped_scores(dtype: torch.dtype) -> None:
    check([70, 0], [20, 300], dtype, shape=Shape(2, 3, 32, 16), soft_cap=2.0)


@BOTH
def test_sixteen_bit_units_are_used_where_there_are_some(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    used = torch_extend._compute_dtype(dtype, 20)
    assert used == dtype
    check([70, 0], [20, 300], dtype)


def test_a_step_without_new_tokens() -> None:
    check([7], [0], torch.float32)
