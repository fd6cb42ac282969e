"""What each decode step on CUDA reads once, decided when the scheduler announces it.

Everything the decision needs is on the host by then, and it is made once: graph
selection and planning look it up by the tensor of rows, which SGLang carries along
unchanged (`kv_loc_plan`) when it copies a batch into buffers of its own. A pass that
was not announced, a warm-up for example, finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_taper.engine.attention.counting import AttentionCounters
from sglang_taper.engine.attention.decoder import MAX_ROWS, Decoder
from sglang_taper.engine.attention.gate import Decision, StepGate
from sglang_taper.engine.attention.prefixes import StepPrefixes
from sglang_taper.engine.attention.slot_copies import SlotCopies
from sglang_taper.ops.segments import Segment
from sglang_taper.policy.attention_gate import AttentionMode, GateReason

NOTHING = Decision((), GateReason.NOTHING_SHARED)


class SharedSteps:
    """Decisions of one model runner. `decoder` None: no step can share.

    Equal on all ranks of a tensor-parallel group, as everything it looks at is: their
    captured graphs exchange addresses, so all must replay the same kind.
    """

    def __init__(
        self,
        gate: StepGate,
        decoder: Decoder | None,
        read: SlotCopies,
        unsupported: str | None = None,
    ) -> None:
        self.prefixes = StepPrefixes()
        self.counters = AttentionCounters()
        self.max_rows = MAX_ROWS
        self.unsupported = unsupported
        self._gate, self._decoder, self._read = gate, decoder, read
        self._announced: Any = None
        self._decision = NOTHING
        self._previous = AttentionMode.PLAIN

    @property
    def may_share(self) -> bool:
        """Whether any step can read a prefix once."""
        available = self.unsupported is None and self._decoder is not None
        return available and not self._gate.never

    @property
    def waits_for_slots(self) -> bool:
        """Whether rows may turn out to share without any row coming or going."""
        return self._read.pending

    @property
    def shares_now(self) -> bool:
        """Whether the pass that was announced last reads a prefix once."""
        return bool(self._decision.segments)

    def announce(
        self,
        reqs: Sequence[Any],
        req_pool_indices: Any,
        seq_lens: Sequence[int] | None,
    ) -> None:
        """`reqs` run next, row by row; `seq_lens` None: not in a decode step."""
        self._announced, self._decision = req_pool_indices, NOTHING
        if seq_lens is not None:
            self._decision = self._decide(reqs, seq_lens)
            self._previous = self._decision.mode
            segments = self._decision.segments
            saved = sum((len(s.rows) - 1) * (s.end - s.start) for s in segments)
            self.counters.decode_step(seq_lens, segments, saved)
            self.counters.decided(self._decision.mode, self._decision.reason)
        self._read.passed()

    def segments_of(self, req_pool_indices: Any) -> tuple[Segment, ...]:
        """What the pass with this tensor reads once; nothing: it is SGLang's own."""
        is_known = req_pool_indices is not None and req_pool_indices is self._announced
        return self._decision.segments if is_known else ()

    def segments_among(
        self, reqs: Sequence[Any], seq_lens: Sequence[int]
    ) -> tuple[Segment, ...]:
        """What a step of `reqs` could read once, whether it pays or not."""
        if not self.may_share or self._decoder is None:
            return ()
        found = self.prefixes.segments_among(reqs, seq_lens, self._read)
        return self._decoder.usable(found, len(reqs)) if found else ()

    def would_not_share(self, reqs: Sequence[Any], seq_lens: Sequence[int]) -> bool:
        """Whether rows of a step of `reqs` share a prefix but each would read it."""
        if self._gate.always:
            return False
        segments = self.segments_among(reqs, seq_lens)
        if not segments:
            return False
        return not self._gate.decide(segments, seq_lens, self._previous).segments

    def _decide(self, reqs: Sequence[Any], seq_lens: Sequence[int]) -> Decision:
        if self.unsupported is not None:
            return self._fall_back(self.unsupported)
        if self._gate.never:
            return self._gate.decide((), seq_lens, self._previous)
        if len(reqs) > self.max_rows:
            return self._fall_back("too many rows")
        segments = self.segments_among(reqs, seq_lens)
        decision = self._gate.decide(segments, seq_lens, self._previous)
        if decision.segments and not self._fits(decision.segments, seq_lens):
            return self._fall_back("too many tokens")
        return decision

    def _fits(self, segments: Sequence[Segment], seq_lens: Sequence[int]) -> bool:
        return self._decoder is not None and self._decoder.fits(segments, seq_lens)

    def _fall_back(self, reason: str) -> Decision:
        self.counters.fell_back(reason)
        return Decision((), GateReason.UNSUPPORTED)
