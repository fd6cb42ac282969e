"""How the scheduler uses the attention of its model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sglang_taper.ops.segments import StepLayout, private_starts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


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
        backend.step_prefixes.announce(batch.reqs)


class SharedTokens:
    """Keeps the policy's view of what rows share equal to what the attention reads
    once: `shared_tokens` of the branches of a batch, set when its rows change."""

    def __init__(self, backend: Any | None) -> None:
        self._backend = backend
        self._reqs: list[Req] = []

    def note(self, batch: ScheduleBatch) -> None:
        """`batch` is about to be planned. Without a backend of ours, rows keep what
        they found in the radix tree."""
        if self._backend is None or self._reqs == batch.reqs:
            return
        self._reqs = list(batch.reqs)
        # the token that the next step computes has no slot yet
        seq_lens = tuple(length + 1 for length in batch.seq_lens_cpu.tolist())
        segments = self._backend.segments_among(batch.reqs, seq_lens)
        starts = private_starts(StepLayout(tuple(segments), seq_lens))
        for req, start in zip(batch.reqs, starts, strict=True):
            req.taper.state.shared_tokens = start


def describe_attention(backend: Any | None) -> dict[str, Any]:
    """The attention in use, by the name its flag has, and its totals."""
    if backend is None:
        return {"backend": "stock"}
    totals = msgspec.structs.asdict(backend.attention_counters)
    return {"backend": backend.shared_prefix_attention, **totals}
