"""The state of a whole scheduler: what it knows, holds, and runs on.

The last is for profiles, and for whoever reads a result.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import attention_backends, get_parallel, get_serving

from sglang_taper.engine.attention.use import describe_attention
from sglang_taper.engine.explain import describe_request
from sglang_taper.engine.live import describe_live
from sglang_taper.engine.messages import EXPLAIN, LIVE
from sglang_taper.engine.report import describe_state

PACKAGES = ("sglang", "sglang-taper", "torch")


def describe(scheduler: Any, action: str, params: dict[str, Any]) -> dict[str, Any]:
    """What a scheduler answers to a control message that it has carried out."""
    if action not in (LIVE, EXPLAIN):
        return describe_scheduler(scheduler)
    taper, waiting = scheduler.taper, waiting_rids(scheduler)
    if action == LIVE:
        return describe_live(taper, params["after_step"], waiting) | {
            **describe_rank(scheduler),
            "max_rows": int(scheduler.max_running_requests),
        }
    records = taper.recorder.book.find(params["id"])
    told = describe_request(records, params["id"], taper.clock.now_ms, waiting)
    return told and told | {"dp_rank": dp_rank()}


def dp_rank() -> int:
    return int(get_parallel().dp_rank or 0)


def describe_rank(scheduler: Any) -> dict[str, Any]:
    """Which data-parallel rank this is, and how full."""
    return {
        "dp_rank": dp_rank(),
        "num_running": len(scheduler.running_batch.reqs),
        "num_waiting": len(scheduler.waiting_queue),
        "pool": describe_pool(scheduler),
    }


def waiting_rids(scheduler: Any) -> set[str]:
    queues = (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue)
    return {req.rid for queue in queues for req in queue}


def describe_scheduler(scheduler: Any) -> dict[str, Any]:
    """What `GET /taper/state` answers: JSON-safe."""
    return describe_state(scheduler.taper) | {
        **describe_rank(scheduler),
        "attention": describe_attention(scheduler._attention),
        "engine": describe_engine(scheduler),
    }


def describe_pool(scheduler: Any) -> dict[str, int]:
    """KV tokens: free, cached (evictable), locked by branches and pins, and all."""
    tree = scheduler.tree_cache
    return {
        "free": int(scheduler.token_to_kv_pool_allocator.available_size()),
        "evictable": int(tree.evictable_size()),
        "protected": int(tree.protected_size()),
        "total": int(scheduler.max_total_num_tokens),
    }


def describe_engine(scheduler: Any) -> dict[str, Any]:
    """JSON-safe; the same for the whole life of a scheduler."""
    model = scheduler.model_config
    return {
        "model": str(get_serving().served_model_name or model.model_path),
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": int(model.vocab_size),
        "context_length": int(scheduler.max_req_len),
        "device": _device_name(str(scheduler.device)),
        "num_threads": torch.get_num_threads(),
        "tp_size": int(get_parallel().tp_size),
        "attention_backend": str(attention_backends()[1]),
        "page_size": int(scheduler.page_size),
        "overlap": bool(scheduler.enable_overlap),
        "max_rows": int(scheduler.max_running_requests),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
    }


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{device}: {_cpu_name()}"


def _cpu_name() -> str:
    """Of the first core; `platform` does not know it on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()
