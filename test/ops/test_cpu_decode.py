"""Decode attention on the CPU against float64, over odd sizes and shapes of trees."""

from __future__ import annotations

import pytest
import torch
from cpu_implementations import CPUS, DTYPES, NATIVE, TORCH, Implementation, each
from decode_cases import (
    Shape,
    Step,
    check_result,
    group_layout,
    make_step,
    random_tree,
    scale_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_taper.errors import FieldError
from sglang_taper.ops import native_plan, torch_attention, torch_plan
from sglang_taper.ops.segments import Segment, StepLayout, private_starts


def check(cpu: Implementation, step: Step, **options: float) -> None:
    plan = step.planned(cpu.make_plan)
    options = {"scale": scale_of(step.q), **options}
    result = cpu.decode(plan, step.q, step.k_pool, step.v_pool, **options)
    check_result(step, result, **options)


@each
@pytest.mark.parametrize("private", [1, 2, 17])
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 33])
def test_a_group_equals_the_truth(
    width: int, prefix: int, private: int, dtype: torch.dtype, cpu: Implementation
) -> None:
    layout = group_layout((width, prefix), private=private)
    check(cpu, make_step(layout, Shape(kv_heads=2, head_dim=32, value_dim=32), dtype))


@each
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_any_ratio_of_heads(
    group: int, kv_heads: int, dtype: torch.dtype, cpu: Implementation
) -> None:
    layout = group_layout((8, 1000), (3, 65), (1, 0), private=17)
    check(cpu, make_step(layout, Shape(kv_heads, group), dtype))


@each
@pytest.mark.parametrize("value_dim", [16, 96])
def test_values_of_another_size_than_keys(
    value_dim: int, dtype: torch.dtype, cpu: Implementation
) -> None:
    layout = group_layout((4, 300), (2, 40), private=2)
    check(cpu, make_step(layout, Shape(2, 2, 48, value_dim), dtype))


@each
def test_soft_capped_scores(dtype: torch.dtype, cpu: Implementation) -> None:
    layout = group_layout((8, 200), (1, 0), private=17)
    check(cpu, make_step(layout, dtype=dtype), soft_cap=2.0, scale=0.7)


@each
@pytest.mark.parametrize("permuted", [False, True], ids=["consecutive", "permuted"])
def test_long_rows_alone_and_in_groups(
    permuted: bool, dtype: torch.dtype, cpu: Implementation
) -> None:
    layout = group_layout((2, 1537), (1, 1100), (3, 700), private=1031)
    check(cpu, make_step(layout, dtype=dtype, permuted=permuted))


@CPUS
def test_runs_of_consecutive_slots_between_scattered_ones(cpu: Implementation) -> None:
    step = make_step(group_layout((2, 2200), (1, 2000), private=3), permuted=False)
    slots = step.slots[0]
    mixed = torch.cat([slots[3:40].flip(0), slots[40:1900], slots[1900:].flip(0)])
    step.req_to_token[step.req_pool_indices[0], : len(mixed)] = mixed.int()
    step.slots[0] = mixed
    step = step._replace(layout=StepLayout((), (len(mixed), 2203, 2003)))
    check(cpu, step)


@each
def test_nested_groups_empty_levels_and_padding_rows(
    dtype: torch.dtype, cpu: Implementation
) -> None:
    layout = StepLayout(
        segments=(
            Segment((0, 1, 2, 3, 4, 5), 0, 900),
            Segment((0, 2, 4), 900, 1500),
            Segment((1, 3), 900, 900),
            Segment((0, 4), 1500, 2100),
            Segment((1, 3), 900, 1437),
            Segment((9, 7), 0, 300),
            Segment((9, 7), 300, 302),
        ),
        seq_lens=(2117, 1500, 1501, 1437, 2101, 900, 0, 302, 5, 303, 0),
    )
    check(cpu, make_step(layout, dtype=dtype))


@each
def test_a_step_of_padding_rows_only(dtype: torch.dtype, cpu: Implementation) -> None:
    check(cpu, make_step(StepLayout((), (0, 0, 0)), dtype=dtype))


@CPUS
def test_a_step_without_rows(cpu: Implementation) -> None:
    step = make_step(StepLayout((), ()))
    out, lse = cpu.decode(
        step.planned(cpu.make_plan), step.q, step.k_pool, step.v_pool, 1.0
    )
    assert (out.shape, lse.shape) == ((0, 9, 64), (0, 9))


@CPUS
@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_tree_of_segments_equals_the_truth(
    data: st.DataObject, dtype: torch.dtype, cpu: Implementation
) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    num_rows = draw(1, 9)
    rows = data.draw(st.permutations(range(num_rows)))
    cut = draw(0, num_rows)
    segments = random_tree(draw, rows[:cut], 4) + random_tree(draw, rows[cut:], 2)
    ends = private_starts(StepLayout(tuple(segments), (0,) * num_rows))
    lens = tuple(end + draw(0, 20) for end in ends)
    shape = Shape(draw(1, 2), draw(1, 3), 16, 16)
    with pytest.MonkeyPatch.context() as patch:
        # small trees then use all that large ones do
        patch.setattr(torch_plan, "CALL_TOKENS", draw(1, 60))
        patch.setattr(torch_plan, "MIN_SPLIT_TOKENS", draw(1, 60))
        patch.setattr(native_plan, "MIN_PIECE_KEYS", draw(1, 60))
        patch.setattr(native_plan, "PIECE_GRANULE", draw(1, 9))
        patch.setattr(native_plan, "MAX_ITEM_ROWS", draw(1, 9))
        patch.setattr(native_plan, "MIN_THREAD_WORK", draw(0, 60))
        patch.setattr(torch, "get_num_threads", lambda: draw(1, 4))
        layout = StepLayout(tuple(segments), lens)
        check(
            cpu,
            make_step(layout, shape, dtype, permuted=bool(draw(0, 1)), seed=num_rows),
        )


@CPUS
def test_a_plan_serves_layers_of_different_shapes(cpu: Implementation) -> None:
    step = make_step(group_layout((4, 600), (2, 3), private=5))
    plan = step.planned(cpu.make_plan)
    for seed, value_dim in [(1, 64), (2, 32), (3, 64)]:
        layer = make_step(step.layout, Shape(2, 4, 64, value_dim), seed=seed)
        layer = layer._replace(k_pool=layer.k_pool[: len(step.k_pool)])
        truth = layer._replace(slots=step.slots)
        result = cpu.decode(
            plan, layer.q, layer.k_pool, layer.v_pool, scale_of(layer.q)
        )
        check_result(truth, result)


@each
def test_groups_may_change_between_steps_over_the_same_pool(
    dtype: torch.dtype, cpu: Implementation
) -> None:
    step = make_step(group_layout((8, 700), (3, 65), private=17), dtype=dtype)
    for rows in [(0, 1, 2, 3), (4, 6), (1, 5, 7), tuple(range(8))]:
        for end in (64, 700):
            layout = StepLayout((Segment(rows, 0, end),), step.layout.seq_lens)
            check(cpu, step._replace(layout=layout))


@each
def test_results_are_not_overwritten_by_the_next_layer(
    dtype: torch.dtype, cpu: Implementation
) -> None:
    step = make_step(group_layout((3, 0), private=9), dtype=dtype)
    plan = step.planned(cpu.make_plan)
    first = cpu.decode(plan, step.q, step.k_pool, step.v_pool, 0.1)
    kept = [tensor.clone() for tensor in first]
    cpu.decode(plan, -step.q, step.k_pool, step.v_pool, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


@CPUS
def test_keys_are_read_in_the_type_of_the_queries(cpu: Implementation) -> None:
    step = make_step(group_layout((4, 600), private=5), dtype=torch.bfloat16)
    check(cpu, step._replace(q=step.q.float()))


@DTYPES
def test_matmul_stands_in_where_the_flash_operator_is_absent(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "_flash", None)
    check(
        TORCH,
        make_step(group_layout((8, 1000), (2, 64), (1, 0), private=17), dtype=dtype),
    )


@DTYPES
def test_the_flash_operator_of_torch_returns_a_natural_logarithm(
    dtype: torch.dtype,
) -> None:
    assert torch_attention._flash is not None
    q, k, v = (torch.randn(1, 2, n, 16).to(dtype) for n in (3, 40, 40))
    out, lse = torch_attention._flash(q, k, v, 0.0, False, scale=0.5)
    scores = q.double() @ k.double().transpose(-1, -2) * 0.5
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-2, rtol=0)
    expected = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)


@CPUS
def test_a_layout_that_does_not_tile_is_refused(cpu: Implementation) -> None:
    step = make_step(group_layout((2, 10), private=1))
    layout = StepLayout((Segment((0, 1), 3, 9),), step.layout.seq_lens)
    with pytest.raises(FieldError, match="start=3"):
        step._replace(layout=layout).planned(cpu.make_plan)


@each
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(80, 80), (128, 128), (256, 256), (7, 5)]
)
def test_any_size_of_heads(
    dim: int, value_dim: int, kv_heads: int, dtype: torch.dtype, cpu: Implementation
) -> None:
    layout = group_layout((9, 257), (1, 0), private=33)
    check(cpu, make_step(layout, Shape(kv_heads, 2, dim, value_dim), dtype))


@CPUS
def test_pools_and_queries_in_half_precision(cpu: Implementation) -> None:
    layout = group_layout((5, 300), (1, 0), private=19)
    for shape in (Shape(), Shape(2, 4, 40, 24)):
        check(cpu, make_step(layout, shape, torch.float16))


@each
def test_queries_and_pools_need_not_be_dense(
    dtype: torch.dtype, cpu: Implementation
) -> None:
    step = make_step(group_layout((5, 300), (1, 0), private=19), dtype=dtype)
    heads = torch.stack([step.q, step.q + 1], 1)[:, 0]
    slots = torch.cat([step.k_pool, step.v_pool], 2).split([64, 64], 2)
    check(cpu, step._replace(q=heads, k_pool=slots[0], v_pool=slots[1]))
    columns = step.q.transpose(1, 2).contiguous().transpose(1, 2)
    check(cpu, step._replace(q=columns))


@each
def test_results_are_written_where_they_are_wanted(
    dtype: torch.dtype, cpu: Implementation
) -> None:
    step = make_step(group_layout((3, 200), (1, 0), private=9), dtype=dtype)
    plan, inputs = step.planned(cpu.make_plan), (step.q, step.k_pool, step.v_pool, 0.1)
    # heads beside others, as a slice of a wider tensor has them
    wide = torch.zeros(len(step.q), 2 * step.q.shape[1], step.q.shape[2], dtype=dtype)
    out, _ = cpu.decode(plan, *inputs, out=wide[:, ::2])
    assert torch.equal(wide[:, ::2], cpu.decode(plan, *inputs)[0])
    assert out.data_ptr() == wide.data_ptr()
    assert not wide[:, 1::2].any()


@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_kernel_gives_the_same_bits_every_time(
    num_threads: int, dtype: torch.dtype
) -> None:
    step = make_step(group_layout((8, 2000), (3, 65), private=170), dtype=dtype)
    plan = step.planned(NATIVE.make_plan)
    plan.num_threads = num_threads
    inputs = (step.q, step.k_pool, step.v_pool, 0.1)
    out, lse = NATIVE.decode(plan, *inputs)
    for _ in range(5):
        again = NATIVE.decode(plan, *inputs)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])


@CPUS
@pytest.mark.parametrize("size", [1e-3, 5.0])
def test_small_and_large_scores(size: float, cpu: Implementation) -> None:
    step = make_step(group_layout((4, 600), (1, 0), private=40))
    check(cpu, step._replace(q=step.q * size), scale=1.0)
    check(cpu, step, scale=-size)
