"""The GPU benchmark, dry: small steps, interpreted kernels, imitated CUDA and modules.

Its figures mean nothing here. That every part runs, that a wrong result is noticed and
that the files are written does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark"))

import shared_prefix_gpu
from shared_prefix import checks, contenders, steps

from sglang_taper.ops.segments import check_layout
from sglang_taper.policy.attention_profile import measured_from_profile

HEADS = steps.Heads(4, 1, 16)
LAUNCH_SHAPES = contenders.LAUNCH_SHAPES


class Clock:
    """CUDA events a millisecond apart."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class Replay:
    """A graph that runs again what it captured, into the same output."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run, self.out = run, run()

    def replay(self) -> None:
        self.out.copy_(self._run())


def capture(run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
    graph = Replay(run)
    return graph, graph.out


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no device")
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(shared_prefix_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(checks, "capture", capture)
    monkeypatch.setattr(checks, "NUM_ROWS", 9)
    monkeypatch.setattr(checks, "NUM_REPLAYS", 2)
    monkeypatch.setattr(checks, "REPLAYS_PER_TIMING", 1)
    layouts = {"one group": steps.Cell(3, 3, 20, 2).layout}
    monkeypatch.setattr(checks, "correctness_layouts", lambda: layouts)
    # the interpreter multiplies bf16 wrongly
    monkeypatch.setattr(torch, "bfloat16", torch.float16)
    monkeypatch.setattr(checks, "TOLERANCE", {torch.float16: 5e-3, torch.float32: 1e-5})
    monkeypatch.setattr(contenders, "WORKSPACE_BYTES", 1024)
    cells = [steps.Cell(2, 2, p, 3) for p in (1, 40)]
    cells += [steps.Cell(4, 1, 0, s) for s in (9, 30)]
    monkeypatch.setattr(shared_prefix_gpu, "WIDE", HEADS)
    monkeypatch.setattr(shared_prefix_gpu, "LAUNCH_SHAPES", LAUNCH_SHAPES[:1])
    monkeypatch.setattr(shared_prefix_gpu, "GRID", {HEADS: cells})
    monkeypatch.setattr(shared_prefix_gpu, "LAUNCH_CELLS", cells[:1])


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    arguments = ["--out", str(folder), "--rounds=1", "--layers=1", *options]
    code = shared_prefix_gpu.main(arguments)
    return code, json.loads((folder / "shared_prefix_gpu.json").read_text())


@pytest.mark.usefixtures("dry")
def test_every_part_runs_and_leaves_its_results(tmp_path: Path) -> None:
    code, results = run(tmp_path)
    # fa3 is a module the imitation does not have
    assert set(results["unavailable"]) == {"plain fa3, correctness in torch.float16"}
    assert results["failures"] == []
    assert code == 0
    assert {len(cell["us"]) for cell in results["cells"]} == {5}
    assert len(results["launch_shapes"]) == 1
    profile = json.loads((tmp_path / "attention_gate.json").read_text())
    names = {(entry["heads"], entry["name"]) for entry in profile}
    assert names == {("4/1/16", name) for name in contenders.SHARED}
    assert {entry.device for entry in measured_from_profile(profile)} == {"no device"}
    table = (tmp_path / "shared_prefix_gpu.md").read_text()
    assert "| 4/1/16 | 2x2 P=40 s=3 | 1000.0 |" in table


@pytest.mark.usefixtures("dry")
def test_the_heads_of_a_model_can_be_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix_gpu, "LAUNCH_SHAPES", [])
    code, results = run(tmp_path, "--heads=6/2/16")
    assert code == 0
    assert {cell["heads"] for cell in results["cells"]} == {"6/2/16"}
    with pytest.raises(SystemExit):
        run(tmp_path, "--heads=6/4/16")


@pytest.mark.usefixtures("dry")
def test_a_wrong_way_fails_the_run_and_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = contenders.TritonContender.run

    def wrong(self: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return right(self, *tensors) * 1.1

    monkeypatch.setattr(contenders.TritonContender, "run", wrong)
    cells = [steps.Cell(2, 2, 5, 3)]
    monkeypatch.setattr(shared_prefix_gpu, "GRID", {HEADS: cells})
    monkeypatch.setattr(shared_prefix_gpu, "LAUNCH_SHAPES", [])
    code, results = run(tmp_path)
    assert code == 1
    assert any("one group: relative error" in f for f in results["failures"])
    assert set(results["cells"][0]["us"]) == {"plain fa2", "cascade 64", "cascade 128"}


def test_slots_are_handed_out_as_a_server_does() -> None:
    step = steps.make_step(
        steps.Cell(2, 2, 3, 2).layout, torch.device("cpu"), scattered=False
    )
    assert step.req_to_token.tolist() == [
        [1, 2, 3, 7, 11],
        [1, 2, 3, 8, 12],
        [4, 5, 6, 9, 13],
        [4, 5, 6, 10, 14],
    ]
    assert step.num_slots == 15


def test_random_layouts_are_valid_and_differ() -> None:
    rng = np.random.default_rng(0)
    layouts = [steps.random_layout(33, 500, rng) for _ in range(20)]
    for layout in layouts:
        check_layout(layout)
    assert len({len(layout.segments) for layout in layouts}) > 3
    assert any(0 in layout.seq_lens for layout in layouts)
