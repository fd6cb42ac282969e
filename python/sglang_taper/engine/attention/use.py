"""How the scheduler uses the attention of its model runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_taper.config import TaperConfig
from sglang_taper.engine.attention.choice import FLAG
from sglang_taper.errors import UnsupportedMode
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


def check_wish(config: TaperConfig, backend: Any | None) -> None:
    """Raise UnsupportedMode if the attention asked for is not the one in use."""
    wanted = config.shared_prefix_attention
    if wanted not in ("auto", "off") and backend is None:
        accepted = "auto or off: SGLang chose another attention for this model"
        raise UnsupportedMode(FLAG, wanted, accepted)


def may_share(backend: Any | None) -> bool:
    """Whether some step of this server can read a shared prefix once."""
    return backend is not None and backend.may_share


def announce(backend: Any | None, batch: ScheduleBatch) -> None:
    """Tell the backend which branches the pass holds that is about to be launched."""
    if backend is not None:
        seq_lens = None
        if batch.forward_mode.is_decode() and batch.seq_lens_cpu is not None:
            seq_lens = batch.seq_lens_cpu.tolist()
        backend.announce(batch.reqs, batch.req_pool_indices, seq_lens)


class SharedTokens:
    """Keeps the policy's view of what rows share equal to what the attention reads
    once: `shared_tokens` of the branches of a batch, set when its rows change."""

    def __init__(self, backend: Any | None) -> None:
        self._backend = backend if may_share(backend) else None
        self._reqs: list[Req] = []
        self._is_final = False

    def note(self, batch: ScheduleBatch) -> None:
        """`batch` is about to be planned. Without a backend of ours, rows keep what
        they found in the radix tree."""
        if self._backend is None or (self._is_final and self._reqs == batch.reqs):
            return
        self._reqs = list(batch.reqs)
        seq_lens = _next_lens(batch)
        segments = self._backend.segments_among(batch.reqs, seq_lens)
        self._is_final = not self._backend.waits_for_slots
        starts = private_starts(StepLayout(tuple(segments), seq_lens))
        for req, start in zip(batch.reqs, starts, strict=True):
            req.taper.state.shared_tokens = start

    def each_reads(self, batch: ScheduleBatch, rows: Sequence[int]) -> bool:
        """Whether in a step of these `rows` each would read what they share."""
        if self._backend is None:
            return False
        lens = _next_lens(batch)
        reqs = [batch.reqs[row] for row in rows]
        return bool(self._backend.would_not_share(reqs, [lens[row] for row in rows]))


def _next_lens(batch: ScheduleBatch) -> tuple[int, ...]:
    """With the token that the next step computes, which has no slot yet."""
    return tuple(length + 1 for length in batch.seq_lens_cpu.tolist())


def describe_attention(backend: Any | None) -> dict[str, Any]:
    """The attention in use, by the name its flag has, and its totals."""
    if backend is None:
        return {"backend": "stock"}
    described = {"backend": backend.shared_prefix_attention}
    reason = getattr(backend, "why_not_native", None)
    if reason is not None:
        described["why_not_native"] = reason
    return described | msgspec.structs.asdict(backend.attention_counters)
