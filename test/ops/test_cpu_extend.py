"""Prefill attention on the CPU against float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cpu_implementations import CPUS, DTYPES, TORCH, Implementation, each
from decode_cases import TOLERANCE, Shape, make_step, relative_error

from sglang_taper.ops import torch_extend
from sglang_taper.ops.reference import reference_extend
from sglang_taper.ops.segments import Segment, StepLayout


def check(
    cpu: Implementation,
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
    plan = cpu.make_extend_plan(
        step.req_to_token, step.req_pool_indices, prefix_lens, extend_lens
    )
    out = cpu.extend(plan, q, step.k_pool, step.v_pool, 0.2, soft_cap)
    pools = (step.k_pool, step.v_pool, step.slots)
    expected, _ = reference_extend(q, *pools, prefix_lens, extend_lens, 0.2, soft_cap)
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


@each
@pytest.mark.parametrize("num_new", [1, 2, 17, 255, 256, 257, 600])
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 1000])
def test_new_tokens_see_the_prefix_and_themselves(
    prefix: int, num_new: int, dtype: torch.dtype, cpu: Implementation
) -> None:
    check(cpu, [prefix], [num_new], dtype)


@each
@pytest.mark.parametrize("permuted", [False, True], ids=["consecutive", "permuted"])
def test_rows_of_different_lengths_in_one_step(
    permuted: bool, dtype: torch.dtype, cpu: Implementation
) -> None:
    check(cpu, [0, 40, 500, 7, 0], [400, 1, 260, 0, 1], dtype, permuted=permuted)


@each
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_any_ratio_of_heads(
    group: int, dtype: torch.dtype, cpu: Implementation
) -> None:
    check(cpu, [100, 0], [30, 290], dtype, shape=Shape(2, group, 32, 32))


@each
def test_siblings_extend_the_same_prefix(
    dtype: torch.dtype, cpu: Implementation
) -> None:
    check(cpu, [90] * 3, [5, 1, 9], dtype, segments=(Segment((0, 1, 2), 0, 90),))


@each
def test_values_of_another_size_and_soft_capped_scores(
    dtype: torch.dtype, cpu: Implementation
) -> None:
    check(cpu, [70, 0], [20, 300], dtype, shape=Shape(2, 3, 32, 16), soft_cap=2.0)


@DTYPES
def test_sixteen_bit_units_are_used_where_there_are_some(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    used = torch_extend._compute_dtype(dtype, 20)
    assert used == dtype
    check(TORCH, [70, 0], [20, 300], dtype)


@CPUS
def test_a_step_without_new_tokens(cpu: Implementation) -> None:
    check(cpu, [7], [0], torch.float32)


@each
@pytest.mark.parametrize("num_threads", [1, 3])
def test_long_rows_are_cut_for_the_threads_there_are(
    num_threads: int,
    dtype: torch.dtype,
    cpu: Implementation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    check(cpu, [1500, 0], [20, 300], dtype)
    check(cpu, [0], [1100], dtype, permuted=False, shape=Shape(1, 2, 64, 64))
