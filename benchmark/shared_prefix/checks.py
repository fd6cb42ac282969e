"""Correctness, graph replay and timing of one way to attend on one device."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_taper.ops.reference import reference_decode
from sglang_taper.ops.segments import Segment, StepLayout
from shared_prefix.contenders import Contender, Maker
from shared_prefix.steps import (
    Cell,
    Heads,
    Step,
    make_step,
    random_layout,
    relative_error,
    tensors,
)

TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
NUM_REPLAYS = 20
REPLAYS_PER_TIMING = 5
NUM_ROWS = 33
MAX_TOKENS = 1 << 17  # of a correctness step, over all rows


def correctness_layouts() -> dict[str, StepLayout]:
    """Of `NUM_ROWS` rows each."""
    lens = [3001, 706, 3017, 701, 702, 34, 40, 50, 0, *[100] * (NUM_ROWS - 9)]
    tree = (
        Segment((0, 2, 1, 4, 3), 0, 700),
        Segment((0, 2, 1), 700, 705),
        Segment((2, 0), 705, 3000),
        Segment((7, 5), 0, 33),
    )
    private = tuple(1 + 7 * row for row in range(NUM_ROWS))
    return {
        "one group": Cell(1, NUM_ROWS, 1000, 17).layout,
        "nothing shared": StepLayout((), private),
        "tree, ungrouped, padding": StepLayout(tree, tuple(lens)),
        "short prefixes": Cell(NUM_ROWS // 3, 3, 1, 1).layout,
    }


def check_correctness(
    heads: Heads, device: torch.device, dtype: torch.dtype, make: Maker
) -> dict[str, float]:
    """Largest relative error against float64 for each layout; raises if too large."""
    contender = make(heads, dtype, device, NUM_ROWS, MAX_TOKENS)
    errors = {}
    for seed, (name, layout) in enumerate(correctness_layouts().items()):
        step = make_step(layout, device, scattered=True, seed=seed)
        q, [(k, v)] = tensors(heads, step, dtype, seed)
        contender.plan(step)
        out = contender.run(q, k, v).cpu()
        slots = [step.slots(row).cpu() for row in range(step.rows)]
        truth, _ = reference_decode(q.cpu(), k.cpu(), v.cpu(), slots, heads.scale)
        errors[name] = relative_error(out, truth)
        if errors[name] > TOLERANCE[dtype]:
            raise AssertionError(f"{name}: relative error {errors[name]:.2e}")
    return errors


def check_replay(heads: Heads, device: torch.device, make: Maker) -> dict[str, float]:
    """Captures once; every replay must equal an eager run of the same plan."""
    rng = np.random.default_rng(0)
    steps = [
        make_step(random_layout(NUM_ROWS, 2000, rng), device, scattered=True, seed=seed)
        for seed in range(NUM_REPLAYS)
    ]
    width = max(step.req_to_token.shape[1] for step in steps)
    largest = max(steps, key=lambda step: step.num_slots)
    static = largest._replace(
        req_to_token=torch.zeros(NUM_ROWS, width, dtype=torch.int32, device=device)
    )
    q, [(k, v)] = tensors(heads, static, torch.bfloat16, 0)
    contender = make(heads, torch.bfloat16, device, NUM_ROWS, MAX_TOKENS)

    def plan(step: Step) -> None:
        static.req_to_token.zero_()
        static.req_to_token[:, : step.req_to_token.shape[1]] = step.req_to_token
        contender.plan(static._replace(layout=step.layout))

    plan(steps[0])
    graph, captured = capture(lambda: contender.run(q, k, v))
    for index, step in enumerate(steps):
        plan(step)
        eager = contender.run(q, k, v).clone()
        captured.fill_(torch.nan)
        graph.replay()
        if not torch.equal(captured, eager):
            error = relative_error(captured, eager)
            raise AssertionError(f"replay {index} differs from eager by {error:.2e}")
    return {"replays": len(steps)}


def capture(run: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """A graph of `run` and its output; compiles and warms up first."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def time_cell(
    contender: Contender, heads: Heads, step: Step, layers: int, rounds: int
) -> tuple[float, torch.Tensor]:
    """Median microseconds of a layer, and the output of the last one."""
    q, pools = tensors(heads, step, torch.bfloat16, 1, layers)
    contender.plan(step)

    def run() -> torch.Tensor:
        return [contender.run(q, k, v) for k, v in pools][-1]

    graph, out = capture(run)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        start.record()
        for _ in range(REPLAYS_PER_TIMING):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPLAYS_PER_TIMING / layers)
    return statistics.median(times[rounds // 5 :]), out
