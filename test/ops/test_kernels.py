"""The Triton kernels without a GPU: interpreted, and compiled for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_taper.kernels import shared_prefix_decode, two_levels
from sglang_taper.ops.triton_decode import (
    MERGE_HEADS,
    AttentionShape,
    LaunchConfig,
    default_config,
)
from sglang_taper.ops.work_list import LARGE_M, SMALL_M, TILE_FIELDS

HERE = Path(__file__).parent
HOPPER = GPUTarget("cuda", 90, 32)
# What one multiprocessor of sm_90 has.
REGISTERS, SHARED_BYTES = 65_536, 227 * 1024


@pytest.mark.slow
def test_kernels_are_right_under_the_interpreter() -> None:
    """In a process of their own: see interpreted/conftest.py."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / "interpreted")]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the benchmark")
def test_the_gpu_benchmark_says_so_without_a_gpu(tmp_path: Path) -> None:
    script = HERE.parents[1] / "benchmark" / "shared_prefix_gpu.py"
    command = [sys.executable, str(script), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


class Compiled(NamedTuple):
    registers: int
    stack_bytes: int  # spills
    shared_bytes: int
    ptx: str


def compile_for_hopper(
    kernel: triton.JITFunction,
    pointers: Mapping[str, str],
    strides: Sequence[str],
    floats: Sequence[str],
    constants: Mapping[str, object],
    tmp_path: Path,
    config: LaunchConfig | None = None,
) -> Compiled:
    """Compile as a launch with aligned pointers and strides would."""
    signature = {name: f"*{kind}" for name, kind in pointers.items()}
    signature |= dict.fromkeys(strides, "i32") | dict.fromkeys(floats, "fp32")
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [kernel.arg_names.index(name) for name in (*pointers, *strides)]
    source = ASTSource(
        kernel,
        signature,
        constexprs=dict(constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    warps, stages = (config.num_warps, config.num_stages) if config else (4, 3)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=HOPPER, options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    shared = compiled.metadata.shared
    return Compiled(int(found[1]), int(found[2]), shared, compiled.asm["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(64, 8, 128, 128),
        AttentionShape(8, 1, 128, 128),
        AttentionShape(9, 3, 64, 64),
    ],
    ids=["64-8-128", "8-1-128", "9-3-64"],
)
def test_the_kernel_fits_a_hopper_multiprocessor_as_often_as_it_is_launched(
    shape: AttentionShape, tmp_path: Path
) -> None:
    config = default_config(shape, torch.bfloat16)
    pools = ("q", "k_pool", "v_pool", "partial_out")
    lists = ("req_to_token", "num_tiles", "tiles", "entry_row", "entry_slot")
    pointers = dict.fromkeys(pools, "bf16") | dict.fromkeys(lists, "i32")
    pointers |= {"partial_lse": "fp32", "req_pool_indices": "i64"}
    compiled = compile_for_hopper(
        shared_prefix_decode.attend_tiles,
        pointers,
        [
            *("q_row_stride", "q_head_stride", "k_slot_stride", "k_head_stride"),
            *("v_slot_stride", "v_head_stride", "request_stride"),
        ],
        ("inner_scale", "outer_scale"),
        {
            "NUM_Q_HEADS": shape.num_q_heads,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim,
            "V_HEAD_DIM": shape.v_head_dim,
            "BLOCK_D": shape.head_dim,
            "BLOCK_DV": shape.v_head_dim,
            "SMALL_M": SMALL_M,
            "LARGE_M": LARGE_M,
            "BLOCK_N": config.key_block,
            "TILE_FIELDS": TILE_FIELDS,
            "HAS_SOFT_CAP": False,
        },
        tmp_path,
        config,
    )
    assert compiled.stack_bytes == 0
    threads = config.programs_per_sm * config.num_warps * 32
    assert compiled.registers * threads <= REGISTERS
    assert compiled.shared_bytes * config.programs_per_sm <= SHARED_BYTES
    assert "wgmma.mma_async" in compiled.ptx, "large tiles use the tensor cores"
    assert "mma.sync" in compiled.ptx, "and so do small ones"
    assert "cp.async.cg" in compiled.ptx, "keys are fetched 16 bytes at a time"


def test_the_merge_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    compiled = compile_for_hopper(
        shared_prefix_decode.merge_partials,
        {
            **{"partial_out": "bf16", "partial_lse": "fp32", "out": "bf16"},
            **{"lse": "fp32", "row_start": "i32"},
        },
        ("out_row_stride", "out_head_stride"),
        (),
        {"NUM_Q_HEADS": 64, "V_HEAD_DIM": 128, "BLOCK_DV": 128, "BLOCK_H": MERGE_HEADS},
        tmp_path,
    )
    assert compiled.stack_bytes == 0
    assert "ld.global.v4" in compiled.ptx, "16 bytes at a time"


def test_the_kernels_around_flashinfer_compile_for_hopper(tmp_path: Path) -> None:
    """64 query heads at 128 are the limit of FlashInfer's own merge; not of ours."""
    merge = compile_for_hopper(
        two_levels.merge_levels,
        {
            **{"shared_out": "bf16", "shared_lse": "fp32", "private_out": "bf16"},
            **{"private_lse": "fp32", "shared_row": "i32", "out": "bf16"},
            "lse": "fp32",
        },
        (),
        (),
        {"NUM_Q_HEADS": 128, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_H": MERGE_HEADS},
        tmp_path,
    )
    assert merge.stack_bytes == 0


@pytest.mark.parametrize("lists", ["i32", "i64"], ids=["two levels", "copied table"])
def test_the_gathering_of_slots_compiles_for_hopper(lists: str, tmp_path: Path) -> None:
    """Its lists are ours, or tensors of SGLang's where rows of a table are copied."""
    gather = compile_for_hopper(
        two_levels.gather_slots,
        {
            **dict.fromkeys(("req_to_token", "first_token", "slots"), "i32"),
            **dict.fromkeys(("row_of", "first_slot", "num_tokens"), lists),
            "req_pool_indices": "i64",
        },
        ("request_stride",),
        (),
        {"BLOCK": 256},
        tmp_path,
    )
    assert gather.stack_bytes == 0
