"""Shared-prefix attention on the CPU against SGLang's `torch_native`, side by side.

    python benchmark/shared_prefix_cpu.py [--threads N] [--repeat N] [--no-server]
                                          [--attention native|torch] [--json FILE]

Attention of one layer in the shape of SmolLM2-135M (9 query heads, 3 KV heads, 64
dimensions), random values in a pool of consecutive slots or of scattered ones:

- `decode`: rows over one shared prefix, or over contexts of their own. "unshared" is
  our own code with the segments taken out, so unshared / ours is what sharing itself
  gives, and stock / unshared what packing query heads and a kernel of our own give;
- `prefill`: new tokens behind a cached prefix.

The forms take turns; each figure is the fastest of `--repeat` calls, with one thread in
processor time, so that other processes on the same cores count little. Then two servers
with the default model (branch_step.py): a decode step of eight branches over a prefix
of 2,048 tokens, and the first token of an uncached prompt of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from branch_step import PREFIX, PROMPT, WIDTH, compare_servers
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from sglang_taper.ops import native_attention, torch_decode, torch_extend
from sglang_taper.ops.native_library import NativeUnavailable, find_library
from sglang_taper.ops.segments import Segment, StepLayout

HEADS, KV_HEADS, DIM = 9, 3, 64
SCALE = DIM**-0.5
# rows, shared tokens, tokens of each row's own
DECODES = ((2, 2048, 64), (8, 2048, 64), (32, 2048, 64), (8, 512, 64), (16, 0, 1024))
# cached tokens, new tokens
PREFILLS = ((0, 1024), (512, 512), (1007, 17), (1023, 1))
HEADER = ("what", "dtype", "slots", "stock ms", "unshared ms", "ours ms")
HEADER += ("stock / ours", "of it sharing")

# What SGLang's methods do does not depend on the object.
_stock: Any = TorchNativeAttnBackend
_stock_decode = _stock._run_sdpa_forward_decode
_stock_extend = _stock._run_sdpa_forward_extend


class CpuOps(NamedTuple):
    """One of our implementations: its modules in `ops`."""

    name: str
    decode: Any
    extend: Any


def choose_ops(wanted: str) -> CpuOps:
    """`auto`: as a server chooses."""
    found = find_library()
    if wanted == "torch" or (wanted == "auto" and isinstance(found, NativeUnavailable)):
        return CpuOps("torch", torch_decode, torch_extend)
    return CpuOps("native", native_attention, native_attention)


class Figure(NamedTuple):
    """Milliseconds of the three forms; `unshared_ms` None where nothing is shared."""

    what: str
    dtype: str
    slots: str
    stock_ms: float
    unshared_ms: float | None
    ours_ms: float

    def cells(self) -> tuple[str, ...]:
        unshared, sharing = "", ""
        if self.unshared_ms is not None:
            unshared = f"{self.unshared_ms:.2f}"
            sharing = f"{self.unshared_ms / self.ours_ms:.1f}x"
        return (
            *self[:3],
            f"{self.stock_ms:.2f}",
            unshared,
            f"{self.ours_ms:.2f}",
            f"{self.stock_ms / self.ours_ms:.1f}x",
            sharing,
        )


def fastest_ms(forms: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """The fastest of `repeat` calls of each form, in turns, after one to warm up."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(forms)
    for attempt in range(repeat + 1):
        for index, form in enumerate(forms):
            began = clock()
            form()
            if attempt:
                best[index] = min(best[index], 1000 * (clock() - began))
    return best


# -- attention of one layer


class Pool(NamedTuple):
    """KV of one layer and a request table, rows at random places of the pool or not."""

    k: Tensor
    v: Tensor
    table: Tensor

    def values(self, count: int) -> Tensor:
        return torch.randn(count, HEADS, DIM).to(self.k.dtype)


def make_pool(
    num_rows: int, shared: int, own: int, dtype: torch.dtype, scattered: bool
) -> Pool:
    size = shared + num_rows * own
    order = torch.randperm(size) if scattered else torch.arange(size)
    private = order[shared:].view(num_rows, own)
    table = torch.cat([order[:shared].expand(num_rows, -1), private], 1).int()
    k, v = (torch.randn(size, KV_HEADS, DIM).to(dtype) for _ in range(2))
    return Pool(k, v, table)


def measure_decode(
    ops: CpuOps,
    case: tuple[int, int, int],
    dtype: torch.dtype,
    scattered: bool,
    repeat: int,
) -> Figure:
    make_plan, decode = ops.decode.make_plan, ops.decode.decode
    num_rows, shared, own = case
    pool = make_pool(*case, dtype, scattered)
    q, rows = pool.values(num_rows), torch.arange(num_rows)
    out, lens = torch.empty_like(q), torch.full((num_rows,), shared + own)
    group = (Segment(tuple(range(num_rows)), 0, shared),) if shared else ()
    mine = torch.empty_like(out)
    plans = [
        make_plan(StepLayout(s, tuple(lens.tolist())), pool.table, rows, dtype)
        for s in (group, ())
    ]
    stock_ms, ours_ms, unshared_ms = fastest_ms(
        [
            lambda: _stock_decode(
                *(None, q, out, pool.k, pool.v, pool.table, rows, lens),
                scaling=SCALE,
                enable_gqa=True,
            ),
            *(lambda p=p: decode(p, q, pool.k, pool.v, SCALE, out=mine) for p in plans),
        ],
        repeat,
    )
    decode(plans[0], q, pool.k, pool.v, SCALE, out=mine)
    torch.testing.assert_close(mine, out, atol=2e-2, rtol=2e-2)
    what = f"decode, {num_rows} rows x {own} tokens"
    if shared:
        what = f"decode, {num_rows} rows, prefix {shared}, own {own}"
    unshared = unshared_ms if shared else None
    return Figure(what, name_of(dtype), kind_of(scattered), stock_ms, unshared, ours_ms)


def measure_prefill(
    ops: CpuOps, case: tuple[int, int], dtype: torch.dtype, repeat: int
) -> Figure:
    extend, (cached, new) = ops.extend.extend, case
    pool = make_pool(1, 0, cached + new, dtype, scattered=False)
    q, row = pool.values(new), torch.zeros(1, dtype=torch.long)
    out, lens = torch.empty_like(q), [torch.tensor([n]) for n in (cached + new, *case)]
    mine = torch.empty_like(out)
    plan = ops.extend.make_extend_plan(pool.table, row, [cached], [new])
    stock_ms, ours_ms = fastest_ms(
        [
            lambda: _stock_extend(
                *(None, q, out, pool.k, pool.v, pool.table, row, *lens),
                scaling=SCALE,
                enable_gqa=True,
                causal=True,
            ),
            lambda: extend(plan, q, pool.k, pool.v, SCALE, out=mine),
        ],
        max(1, repeat // 3),
    )
    torch.testing.assert_close(mine, out, atol=2e-2, rtol=2e-2)
    what = f"prefill, {new} tokens after {cached}"
    return Figure(what, name_of(dtype), kind_of(False), stock_ms, None, ours_ms)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(scattered: bool) -> str:
    return "scattered" if scattered else "consecutive"


def measure_layer(ops: CpuOps, repeat: int) -> list[Figure]:
    figures = []
    for dtype in (torch.bfloat16, torch.float32):
        for scattered in (False, True):
            for rows in DECODES:
                figures.append(measure_decode(ops, rows, dtype, scattered, repeat))
        figures += [measure_prefill(ops, c, dtype, repeat) for c in PREFILLS]
    return figures


# -- whole steps of a server


def measure_servers(model: str, dtype: str, rounds: int) -> list[Figure]:
    found = compare_servers(model, dtype, rounds)
    step = f"server: decode step, {WIDTH} rows, prefix {PREFIX}"
    prompt = f"server: first token of a prompt of {PROMPT}"
    steps = (found.stock_step_ms, found.unshared_step_ms, found.shared_step_ms)
    return [
        Figure(step, dtype, "", *steps),
        Figure(prompt, dtype, "", found.stock_prompt_ms, None, found.prompt_ms),
    ]


# -- all of it


def markdown_table(figures: Sequence[Figure]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *(f.cells() for f in figures)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=20, help="calls of each form")
    parser.add_argument("--attention", default="auto", choices=("native", "torch"))
    parser.add_argument("--rounds", type=int, default=3, help="rounds on the servers")
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ops = choose_ops(args.attention)
    figures = measure_layer(ops, args.repeat)
    if not args.no_server:
        for dtype in ("bfloat16", "float32"):
            figures += measure_servers(args.model_path, dtype, args.rounds)
    print(f"{ops.name}, {args.threads} threads, torch {torch.__version__}\n")
    print(markdown_table(figures))
    if args.json:
        facts = {"attention": ops.name, "threads": args.threads}
        facts |= {"figures": [f._asdict() for f in figures]}
        Path(args.json).write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
