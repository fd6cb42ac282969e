"""SGLang's `torch_native` attention with decode and prefill computed by `ops`.

Takes the place of SGLang's class under the same name, so everything SGLang decides by
that name stays decided. Writing KV, reshaping and the choice of layers are SGLang's;
only the two functions that compute are ours, and what they do not serve goes to the
original, counted with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_taper.config import load
from sglang_taper.engine.attention.counting import AttentionCounters
from sglang_taper.engine.attention.cpu_ops import choose_ops
from sglang_taper.engine.attention.prefixes import Member, StepPrefixes
from sglang_taper.ops.segments import Segment, StepLayout


class SharedPrefixTorchBackend(TorchNativeAttnBackend):
    """One per model runner. On another device than the CPU it does what SGLang does."""

    # SGLang's memory is the host's, and whatever is shared is read once
    may_share, waits_for_slots = True, False

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.step_prefixes = StepPrefixes()
        self.attention_counters = AttentionCounters()
        self._dtype: torch.dtype = model_runner.dtype
        dtypes = (self._dtype, model_runner.kv_cache_dtype)
        self._ops = choose_ops(load().shared_prefix_attention, *dtypes)
        self.shared_prefix_attention = self._ops.name
        self.why_not_native = self._ops.why_not_native
        self._is_decode = False  # the pass that is planned
        self._rows: Any = None  # `req_pool_indices` of the pass that is planned
        self._fallbacks: set[str] = set()  # reasons in this pass

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the pass: once, for all layers."""
        super().init_forward_metadata(forward_batch)
        self._rows = forward_batch.req_pool_indices
        self._fallbacks.clear()
        self.forward_metadata = self._plan(forward_batch)

    def _plan(self, forward_batch: Any) -> Any:
        mode = forward_batch.forward_mode
        self._is_decode = mode.is_decode()
        if str(self.device) != "cpu":
            self._fall_back("device")
        elif forward_batch.encoder_lens is not None:
            self._fall_back("encoder")
        elif mode.is_decode():
            return self._plan_decode(forward_batch)
        elif mode.is_extend_without_speculative():
            return self._plan_extend(forward_batch)
        elif not mode.is_idle():
            self._fall_back("forward mode")
        return None

    def _plan_extend(self, forward_batch: Any) -> Any:
        return self._ops.extend.make_extend_plan(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
        )

    def _plan_decode(self, forward_batch: Any) -> Any:
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens.tolist()
        segments = self.step_prefixes.segments(
            rows.tolist(), seq_lens, self._read_slots
        )
        layout = StepLayout(tuple(segments), tuple(seq_lens))
        table: torch.Tensor = self.req_to_token_pool.req_to_token
        plan = self._ops.decode.make_plan(layout, table, rows, self._dtype)
        counters = self.attention_counters
        counters.decode_step(seq_lens, segments, plan.num_saved_tokens)
        return plan

    def announce(self, reqs: Sequence[Any], *_tensors: Any) -> None:
        """`reqs` run next, in this order."""
        self.step_prefixes.announce(reqs)

    def would_not_share(self, reqs: Sequence[Any], seq_lens: Sequence[int]) -> bool:
        """Whether a step of `reqs` would read a shared prefix for each row."""
        return False

    def segments_among(
        self, reqs: Sequence[Any], seq_lens: Sequence[int]
    ) -> list[Segment]:
        """What rows of `reqs` would share in a decode step of all of them."""
        return self.step_prefixes.segments_among(reqs, seq_lens, self._read_slots)

    def _read_slots(self, member: Member) -> np.ndarray:
        table: torch.Tensor = self.req_to_token_pool.req_to_token
        slots: np.ndarray = table[member.row, : member.num_tokens].numpy()
        return slots

    def _fall_back(self, reason: str) -> None:
        if reason not in self._fallbacks:
            self._fallbacks.add(reason)
            self.attention_counters.fell_back(reason)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        pools = (k_cache, v_cache)
        plan = self._plan_for(True, args, kwargs)
        if plan is None:
            compute: Callable[..., torch.Tensor] = super()._run_sdpa_forward_decode
            return compute(query, output, *pools, *args, **kwargs)
        scale = _scale(kwargs, query)
        self._ops.decode.decode(plan, query, *pools, scale, out=output)
        return output

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        pools = (k_cache, v_cache)
        plan = self._plan_for(False, args, kwargs)
        if plan is not None and not kwargs["causal"]:
            self._fall_back("not causal")
            plan = None
        if plan is None:
            compute: Callable[..., torch.Tensor] = super()._run_sdpa_forward_extend
            return compute(query, output, *pools, *args, **kwargs)
        scale = _scale(kwargs, query)
        self._ops.extend.extend(plan, query, *pools, scale, out=output)
        return output

    def _plan_for(
        self, is_decode: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The plan of this pass if it serves this layer; `args` as SGLang passes them,
        after the pools: the request table, the rows, their lengths."""
        plan = self.forward_metadata
        if plan is None:
            return None
        reason = None
        if is_decode != self._is_decode or args[1] is not self._rows:
            reason = "not planned"
        elif kwargs["is_cross_attn"]:
            reason = "cross attention"
        elif kwargs["sliding_window_size"] is not None:
            reason = "sliding window"
        if reason is not None:
            self._fall_back(reason)
        return plan if reason is None else None


def _scale(kwargs: dict[str, Any], query: torch.Tensor) -> float:
    scaling = kwargs.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)
