"""Shared-prefix decode attention on a CUDA device, against float64 and in graphs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from trees import Case, group, make_case, relative_error, tree

from sglang_taper.ops import triton_decode
from sglang_taper.ops.reference import reference_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, DIM, ROWS = (64, 8), 128, 33
SCALE = 1 / math.sqrt(DIM)
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# plans a case; the result runs a layer of it
Planner = Callable[[Case], Run]

LAYOUTS = [
    group(33, 1000, 17),
    group(33, 63, 1),
    tree(
        ([0, 2, 1, 4, 3], 0, 700),
        ([0, 2, 1], 700, 705),
        ([2, 0], 705, 3000),
        ([7, 5], 0, 33),
        lens=[3001, 706, 3017, 701, 702, 34, 40, 50, 0, *[100] * 24],
    ),
    tree(lens=[1 + 7 * row for row in range(33)]),
]


def triton_planner(case: Case) -> Planner:
    shape = triton_decode.AttentionShape(*HEADS, DIM, DIM)
    buffers = triton_decode.DecodeBuffers(
        shape, case.q.dtype, case.q.device, max_rows=ROWS
    )

    def plan(step: Case) -> Run:
        made = triton_decode.make_plan(
            step.layout, step.req_to_token, step.req_pool_indices, buffers=buffers
        )
        return lambda *tensors: triton_decode.decode(made, *tensors, SCALE)[0]

    return plan


def flashinfer_planner(case: Case) -> Planner:
    pytest.importorskip("flashinfer")
    from sglang_taper.ops import flashinfer_decode as backend
    from sglang_taper.ops.flashinfer_levels import FlashInferShape

    shape = FlashInferShape(*HEADS, DIM, case.q.dtype)
    memory = backend.SharedMemory(
        shape,
        torch.zeros(128 << 20, dtype=torch.uint8, device=case.q.device),
        max_rows=ROWS,
        max_shared_tokens=1 << 17,
        max_private_tokens=1 << 17,
    )
    buffers = backend.FlashInferBuffers(shape, memory, num_rows=ROWS, num_slots=26)

    def plan(step: Case) -> Run:
        made = backend.make_plan(
            step.layout, step.req_to_token, step.req_pool_indices, buffers=buffers
        )
        return lambda *tensors: backend.decode(made, *tensors, SCALE)[0]

    return plan


def on_gpu(case: Case) -> Case:
    return Case(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in case))


def cases(dtype: torch.dtype) -> list[Case]:
    made = [
        make_case(layout, HEADS, (DIM, DIM), dtype=dtype, seed=seed)
        for seed, layout in enumerate(LAYOUTS)
    ]
    # one captured launch reads one pool and one table
    sizes = [
        max(len(c.k_pool) for c in made),
        max(c.req_to_token.shape[1] for c in made),
    ]
    return [_padded(case, *sizes) for case in made]


def _padded(case: Case, num_slots: int, num_tokens: int) -> Case:
    pools = [
        torch.cat([p, p.new_full((num_slots - len(p), *p.shape[1:]), torch.nan)])
        for p in (case.k_pool, case.v_pool)
    ]
    missing = num_tokens - case.req_to_token.shape[1]
    table = torch.nn.functional.pad(case.req_to_token, (0, missing))
    return case._replace(k_pool=pools[0], v_pool=pools[1], req_to_token=table)


def truth(case: Case) -> torch.Tensor:
    return reference_decode(case.q, case.k_pool, case.v_pool, case.slots, SCALE)[0]


@pytest.mark.parametrize("planner", [triton_planner, flashinfer_planner])
def test_bf16_is_within_5e_3_of_float64(planner: Callable[[Case], Planner]) -> None:
    steps = cases(torch.bfloat16)
    plan = planner(on_gpu(steps[0]))
    for case in steps:
        step = on_gpu(case)
        out = plan(step)(step.q, step.k_pool, step.v_pool)
        assert relative_error(out.cpu(), truth(case)) < 5e-3


def test_fp32_is_within_1e_5_of_float64() -> None:
    steps = cases(torch.float32)
    plan = triton_planner(on_gpu(steps[0]))
    for case in steps:
        step = on_gpu(case)
        out = plan(step)(step.q, step.k_pool, step.v_pool)
        assert relative_error(out.cpu(), truth(case)) < 1e-5


@pytest.mark.parametrize("planner", [triton_planner, flashinfer_planner])
def test_one_captured_graph_serves_all_groupings(
    planner: Callable[[Case], Planner],
) -> None:
    steps = [on_gpu(case) for case in cases(torch.bfloat16)]
    static = on_gpu(cases(torch.bfloat16)[0])
    plan = planner(static)
    run = plan(static)
    run(static.q, static.k_pool, static.v_pool)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static.q, static.k_pool, static.v_pool)
    for step in [*steps, *reversed(steps)]:
        for field in ("q", "k_pool", "v_pool", "req_to_token", "req_pool_indices"):
            getattr(static, field).copy_(getattr(step, field))
        eager = plan(static._replace(layout=step.layout))(
            static.q, static.k_pool, static.v_pool
        ).clone()
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, eager)
