"""Which shared prefixes of a decode step are read once: asked for, or when it pays.

Asked for (`--shared-prefix-attention flashinfer` or `triton`): all. With `auto` the
cost model decides, from constants measured on this device; without them nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sglang_taper.ops.segments import Segment
from sglang_taper.policy.attention_gate import (
    AttentionMode,
    GateReason,
    SharedSegment,
    StepShape,
    decide,
    pays,
)
from sglang_taper.policy.attention_profile import MeasuredAttention

ASKED_FOR = "asked_for"


class Decision(msgspec.Struct, frozen=True):
    """`segments` are read once in the step; none: it is SGLang's own."""

    segments: tuple[Segment, ...]
    reason: str

    @property
    def mode(self) -> AttentionMode:
        return AttentionMode.CASCADE if self.segments else AttentionMode.PLAIN


class StepGate:
    """Decides for one step; keeps nothing, so the same question has the same answer.

    With `always`, whatever is shared is read once, and `measured` does not matter.
    """

    def __init__(self, always: bool, measured: MeasuredAttention | None = None) -> None:
        self.always, self._measured = always, measured

    @property
    def never(self) -> bool:
        """Whether no step can ever share."""
        return not self.always and self._measured is None

    def decide(
        self,
        segments: Sequence[Segment],
        seq_lens: Sequence[int],
        previous: AttentionMode,
    ) -> Decision:
        """`segments` could be read once; `previous` is the last step's mode."""
        if self._measured is None and not self.always:
            return Decision((), GateReason.UNMEASURED)
        if not segments:
            return Decision((), GateReason.NOTHING_SHARED)
        if self._measured is None or self.always:
            return Decision(tuple(segments), ASKED_FOR)
        return _decide(self._measured, segments, seq_lens, previous)


def _decide(
    measured: MeasuredAttention,
    segments: Sequence[Segment],
    seq_lens: Sequence[int],
    previous: AttentionMode,
) -> Decision:
    constants, shape = measured.constants, measured.shape
    paying = parents_first(s for s in segments if pays(constants, shape, _measure(s)))
    if not paying:
        return Decision((), GateReason.NO_GAIN)
    measures = tuple(map(_measure, paying))
    step = StepShape(measures, len(seq_lens), _private(paying, seq_lens))
    decision = decide(constants, shape, step, previous)
    chosen = paying if decision.mode is AttentionMode.CASCADE else ()
    return Decision(chosen, decision.reason)


def parents_first(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Those whose rows have everything before them too: what is below a segment that
    was left out is left out with it."""
    ends: dict[int, int] = {}
    kept = []
    for segment in segments:
        if all(ends.get(row, 0) == segment.start for row in segment.rows):
            kept.append(segment)
            ends |= dict.fromkeys(segment.rows, segment.end)
    return tuple(kept)


def _measure(segment: Segment) -> SharedSegment:
    return SharedSegment(len(segment.rows), segment.end - segment.start)


def _private(segments: Sequence[Segment], seq_lens: Sequence[int]) -> int:
    shared = sum(len(s.rows) * (s.end - s.start) for s in segments)
    return sum(seq_lens) - shared
