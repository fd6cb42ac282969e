"""Decode steps that read a prefix once, put in front of a backend of SGLang.

SGLang plans a pass in `init_forward_metadata` (eager) or before a captured graph in
`init_forward_metadata_out_graph`, and its layers then ask `forward_metadata` for the
planned wrapper. For a step that shares, we put our own plan there. Everything else is
the backend's.

CUDA graphs come in two variants per batch size. SGLang asks `select` which one a batch
replays and has it planned right after; what was captured is never captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import (
    get_capture_attention_variant,
)

from sglang_taper.engine.attention.decoder import Decoder, PlannedDecode
from sglang_taper.engine.attention.shared_steps import SharedSteps
from sglang_taper.engine.attention.use import shared_prefix_backend
from sglang_taper.ops.segments import Segment
from sglang_taper.policy.attention_gate import AttentionMode

PLAIN, SHARED = str(AttentionMode.PLAIN), str(AttentionMode.CASCADE)


class SharedPrefixVariants:
    """SGLang's `AttentionGraphVariants`: which captured graph a batch replays."""

    capture_labels: ClassVar[tuple[str, ...]] = (PLAIN, SHARED)

    def __init__(self, sharing: SharedSteps) -> None:
        self._sharing = sharing

    def select(self, forward_batch: Any) -> str:
        """Asked up to twice for a batch; the answer was decided before the pass."""
        shares = self._sharing.segments_of(rows_of(forward_batch))
        return SHARED if shares else PLAIN


def rows_of(forward_batch: Any) -> Any | None:
    """The tensor of rows that the scheduler announced, also of a copy of the batch."""
    plan = getattr(forward_batch, "kv_loc_plan", None)
    return None if plan is None else plan.req_pool_indices


class SharedDecode:
    """Mixin, left of SGLang's class. Does nothing until `share_prefixes` is called."""

    sharing: SharedSteps | None = None
    # SGLang's
    forward_metadata: Any
    decode_cuda_graph_metadata: dict[int, Any]

    def share_prefixes(self, sharing: SharedSteps, decoder: Decoder | None) -> None:
        self.sharing, self._decoder = sharing, decoder
        self.step_prefixes = sharing.prefixes
        self.attention_counters = sharing.counters
        self._captured: set[int] = set()

    def make_metadata(self, wrappers: Any) -> Any:
        """What SGLang's layers find their planned wrappers in."""
        raise NotImplementedError

    # -- what the scheduler asks (`use.py`)

    @property
    def may_share(self) -> bool:
        return self.sharing is not None and self.sharing.may_share

    @property
    def waits_for_slots(self) -> bool:
        return self.sharing is not None and self.sharing.waits_for_slots

    def announce(self, *step: Any) -> None:
        if self.sharing is not None:
            self.sharing.announce(*step)

    def segments_among(
        self, reqs: Sequence[Any], seq_lens: Sequence[int]
    ) -> Sequence[Segment]:
        """What rows of `reqs` could share in a decode step of all of them."""
        return self.sharing.segments_among(reqs, seq_lens) if self.sharing else ()

    def would_not_share(self, reqs: Sequence[Any], seq_lens: Sequence[int]) -> bool:
        """Whether such a step would be plain although rows share."""
        return bool(self.sharing and self.sharing.would_not_share(reqs, seq_lens))

    # -- what SGLang's runners ask

    def graph_variants(self) -> SharedPrefixVariants | None:
        """None: one graph per batch size, SGLang's."""
        if self.sharing is None or not self.sharing.may_share:
            return None
        return SharedPrefixVariants(self.sharing)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager pass."""
        segments = self._segments_of(forward_batch)
        if segments:
            self._plan(forward_batch, segments, in_graph=False)
        else:
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        """Plan a captured pass, before its capture or a replay."""
        if in_capture and self._captures_shared(forward_batch):
            self._plan_capture(forward_batch)
            return
        segments = () if in_capture else self._segments_of(forward_batch)
        if segments:
            self._plan(forward_batch, segments, in_graph=True)
            return
        super().init_forward_metadata_out_graph(  # type: ignore[misc]
            forward_batch, in_capture=in_capture
        )

    def _segments_of(self, forward_batch: Any) -> Sequence[Segment]:
        if self.sharing is None or not forward_batch.forward_mode.is_decode():
            return ()
        return self.sharing.segments_of(rows_of(forward_batch))

    def _plan(
        self, forward_batch: Any, segments: Sequence[Segment], in_graph: bool
    ) -> None:
        """Rows beyond those announced are padding, behind them and one token long."""
        seq_lens = forward_batch.seq_lens_cpu.tolist()
        self._put(self._planned(forward_batch, segments, seq_lens, in_graph))

    def _captures_shared(self, forward_batch: Any) -> bool:
        """Whether this capture is ours; learns that graphs come without variants."""
        if not self.may_share or not forward_batch.forward_mode.is_decode():
            return False
        variant = get_capture_attention_variant()
        if variant not in SharedPrefixVariants.capture_labels:
            assert self.sharing is not None
            self.sharing.unsupported = "other graph variants"
        return variant == SHARED

    def _plan_capture(self, forward_batch: Any) -> None:
        num_rows = forward_batch.batch_size
        assert self.sharing is not None
        assert self._decoder is not None
        if self._decoder.prepare(num_rows):
            self._captured.add(num_rows)
            lens = [1] * num_rows
            self._put(self._planned(forward_batch, (), lens, in_graph=True))
        else:
            # never replayed; made anew, these wrappers would be lost to the plain graph
            wrappers = self.decode_cuda_graph_metadata[num_rows]
            self.forward_metadata = self.make_metadata(wrappers)
        self.sharing.max_rows = max(self._captured, default=0)

    def _planned(
        self,
        forward_batch: Any,
        segments: Sequence[Segment],
        seq_lens: Sequence[int],
        in_graph: bool,
    ) -> PlannedDecode:
        assert self._decoder is not None
        on_device = (forward_batch.req_pool_indices, forward_batch.seq_lens)
        return self._decoder.plan(segments, seq_lens, *on_device, in_graph)

    def _put(self, planned: PlannedDecode) -> None:
        self.forward_metadata = self.make_metadata([planned])


def graph_variants_hook(
    original: Callable[..., Any], model_runner: Any, mode: ForwardMode, *args: Any
) -> Any:
    """AROUND `create_dsv41_candidate_graph_variants`.

    It is the last place that is asked for variants, and the only one that is told the
    model runner.
    """
    variants = original(model_runner, mode, *args)
    backend = shared_prefix_backend(model_runner)
    if variants is not None or mode != ForwardMode.DECODE:
        return variants
    return backend.graph_variants() if isinstance(backend, SharedDecode) else None
