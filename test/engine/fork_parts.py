"""Sizes, settings and SGLang's own memory for `ForkEngine` (fork_engine.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest import mock

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
from sglang.srt.server_args import ServerArgs

from sglang_taper.engine.retraction import keep_one_branch_hook
from sglang_taper.policy.types import AdmissionPlan, StepView

MAX_CONTEXT = 400
TTL_S = 5.0
MAX_PINNED_FRACTION = 0.4


class Shape:
    """Sizes of an engine; the pool is small so that everything competes for it."""

    def __init__(
        self,
        core: str,
        page_size: int,
        overlap: bool,
        num_tokens: int = 512,
        num_rows: int = 12,
        chunk: int = 48,
    ) -> None:
        self.core, self.page_size, self.overlap = core, page_size, overlap
        self.num_tokens, self.num_rows, self.chunk = num_tokens, num_rows, chunk


@contextmanager
def engine_settings(shape: Shape) -> Iterator[None]:
    """SGLang's and our process-wide settings, for the engines made inside."""
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        page_size=shape.page_size,
        chunked_prefill_size=shape.chunk,
        disable_overlap_schedule=not shape.overlap,
        max_running_requests=shape.num_rows,
    )
    environment = {
        "SGLANG_TAPER_BRANCH_POLICY": "eager",
        "SGLANG_TAPER_FORK_PIN_TTL_S": str(TTL_S),
        "SGLANG_TAPER_MAX_PINNED_FRACTION": str(MAX_PINNED_FRACTION),
    }
    original = ScheduleBatch._get_decode_retraction_order
    context = create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(
            envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(shape.core)
        )
        stack.enter_context(use_context(context))
        stack.enter_context(
            mock.patch.object(
                ScheduleBatch,
                "_get_decode_retraction_order",
                staticmethod(lambda reqs: keep_one_branch_hook(original, reqs)),
            )
        )
        context.override("test", pp_max_micro_batch_size=shape.num_rows)
        yield


class RandomWidth:
    """A policy: one row of each request, and each other row or not."""

    def __init__(self) -> None:
        self.random = Random(0)

    def plan(self, step: StepView) -> AdmissionPlan:
        rows, seen = set(step.must_run), set()
        order = list(range(step.num_rows))
        self.random.shuffle(order)
        for row in order:
            request = step.request_of_row[row]
            if request not in seen or self.random.random() < 0.6:
                rows.add(row)
            seen.add(request)
        return AdmissionPlan(rows=sorted(rows), reason="random")


def make_pools(shape: Shape) -> tuple[ReqToTokenPool, Any]:
    """The table of rows, and an allocator over one layer of float32 KV."""
    rows = ReqToTokenPool(shape.num_rows, MAX_CONTEXT, "cpu", False)
    kv = MHATokenToKVPool(
        size=shape.num_tokens,
        page_size=shape.page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=1,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    common = (torch.float32, "cpu", kv, False)
    if shape.page_size == 1:
        return rows, TokenToKVPoolAllocator(shape.num_tokens, *common)
    return rows, PagedTokenToKVPoolAllocator(shape.num_tokens, shape.page_size, *common)


def make_tree(shape: Shape, rows: ReqToTokenPool, allocator: Any) -> UnifiedRadixCache:
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=shape.page_size,
        chunked_prefill_size=shape.chunk,
        tree_components=(ComponentType.FULL,),
    )
    return UnifiedRadixCache(params=params)
