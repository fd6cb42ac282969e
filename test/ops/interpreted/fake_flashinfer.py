"""FlashInfer's compiled modules, in torch on the CPU.

The wrappers above them are the real ones of the installed package, so what is passed to
them and what they pass on is checked: number and meaning of the arguments, and that the
static arrays hold at run time what was planned.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import flashinfer
import pytest
import torch


def attend(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    bounds: list[tuple[int, int, int, int]],
    slots: torch.Tensor,
    scales: tuple[float, float],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Queries [a, b) over slots [c, d) for each of `bounds`; base-2 lse if wanted."""
    soft_cap, scale = scales
    for a, b, c, d in bounds:
        at = slots[c:d].long()
        k, v = (pool[at, 0].double() for pool in pools)
        grouped = q[a:b].double().unflatten(1, (k.shape[1], -1))
        logits = torch.einsum("qhgd,khd->qhgk", grouped, k) * scale
        if soft_cap > 0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if lse is not None:
            lse[a:b] = (logits.logsumexp(-1) / math.log(2)).flatten(1, 2)
        weights = logits.softmax(-1) if len(at) else logits
        mixed = torch.einsum("qhgk,khd->qhgd", weights, v).flatten(1, 2)
        out[a:b] = mixed.to(out.dtype)


def is_planned(plan: list[torch.Tensor], arrays: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(p, a) for p, a in zip(plan, arrays, strict=True))


class FakePrefill:
    """The FA2 module: serves level 0, and level 1 on the tensor cores."""

    def __init__(self, *key: Any) -> None:
        if key[0] != "fa2":
            raise RuntimeError(f"no module for {key[0]}")
        self.soft_cap_compiled = bool(key[9])
        self.num_plans = 0

    def plan(self, *args: Any) -> list[torch.Tensor]:
        assert len(args) == 20
        _, _, _, qo_indptr, kv_indptr, kv_lens, rows, slots = args[:8]
        heads, kv_heads, page, graph, dim_qk, dim_vo, causal, window = args[8:16]
        assert args[16:] == (-1, False, 0, 0)
        for tensor in (qo_indptr, kv_indptr, kv_lens):
            assert (tensor.device.type, tensor.dtype) == ("cpu", torch.int32)
        assert len(qo_indptr) == len(kv_indptr) == slots + 1
        assert len(kv_lens) == slots
        assert (qo_indptr.diff() >= 0).all()
        assert (kv_indptr.diff() >= 0).all()
        assert qo_indptr[-1] == rows
        assert heads % kv_heads == 0
        assert dim_qk == dim_vo
        assert (page, graph, causal, window) == (1, True, False, -1)
        self.num_plans += 1
        return [qo_indptr.clone(), kv_indptr.clone()]

    def paged_run(self, *args: Any) -> None:
        plan, q, k, v, qo_indptr, kv_indptr, slots = args[2:9]
        out, lse, mask_mode, layout, window = args[10:15]
        assert (mask_mode, layout, window) == (0, 0, -1)
        assert is_planned(plan, (qo_indptr, kv_indptr))
        soft_cap, scale = args[22:24]
        assert (soft_cap > 0) == self.soft_cap_compiled
        a, c = qo_indptr.tolist(), kv_indptr.tolist()
        bounds = list(zip(a, a[1:], c, c[1:], strict=False))
        attend(q, (k, v), bounds, slots, (soft_cap, scale), out, lse)


class FakeDecode:
    """The CUDA-core decode module."""

    def __init__(self, *key: Any) -> None:
        self.soft_cap_compiled = bool(key[8])

    def plan(self, *args: Any) -> list[torch.Tensor]:
        assert len(args) == 15
        kv_indptr, rows, heads, kv_heads, page, graph, window = args[3:10]
        assert kv_indptr.device.type == "cpu"
        assert len(kv_indptr) == rows + 1
        assert heads // kv_heads in (1, 2, 3)
        assert (page, graph, window) == (1, True, -1)
        return [kv_indptr.clone()]

    def run(self, *args: Any) -> None:
        plan, q, k, v, kv_indptr, slots, _, out, lse, layout, window = args[2:13]
        assert (layout, window) == (0, -1)
        assert is_planned(plan, (kv_indptr,))
        soft_cap, scale = args[15:17]
        assert (soft_cap > 0) == self.soft_cap_compiled
        c = kv_indptr.tolist()
        bounds = [(i, i + 1, *c[i : i + 2]) for i in range(len(c) - 1)]
        attend(q, (k, v), bounds, slots, (soft_cap, scale), out, lse)


def install(monkeypatch: pytest.MonkeyPatch) -> list[FakePrefill]:
    """Put the fakes under the wrappers; returns the FA2 modules made, in order."""
    made: list[FakePrefill] = []

    def prefill(*key: Any) -> FakePrefill:
        made.append(FakePrefill(*key))
        return made[-1]

    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", prefill)
    monkeypatch.setattr(flashinfer.decode, "get_batch_prefill_module", prefill)
    monkeypatch.setattr(flashinfer.decode, "get_batch_decode_module", FakeDecode)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", _unpinned(torch.empty))
    return made


def _unpinned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    return make
