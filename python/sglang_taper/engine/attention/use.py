"""How the scheduler uses the attention of its model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def shared_prefix_backend(model_runner: Any) -> Any | None:
    """The backend of ours that decodes for this runner; None for SGLang's own.

    Looks into SGLang's wrappers of several backends.
    """
    backend = model_runner.attn_backend
    for name in (None, "decode_backend", "full_attn_backend"):
        found = getattr(backend, name, None) if name else backend
        if hasattr(found, "step_prefixes"):
            return found
    return None


def announce(backend: Any | None, batch: ScheduleBatch) -> None:
    """Tell the backend which branches the pass holds that is about to be launched."""
    if backend is not None:
        backend.step_prefixes.announce(batch.reqs, batch.req_pool_indices)


def describe_attention(backend: Any | None) -> dict[str, Any]:
    """The attention in use, by the name its flag has, and its totals."""
    if backend is None:
        return {"backend": "stock"}
    totals = msgspec.structs.asdict(backend.attention_counters)
    return {"backend": backend.shared_prefix_attention, **totals}
