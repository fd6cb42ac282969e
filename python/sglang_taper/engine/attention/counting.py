"""What the attention of a server did: numbers for the state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_taper.ops.segments import Segment


class AttentionCounters(msgspec.Struct):
    """Totals since the server started.

    `num_kv_tokens` counts the tokens of all rows of decode steps, `num_saved_tokens`
    those of them that were not read again because another row had read them.
    `fallbacks` counts forward passes in which a layer used SGLang's own attention,
    `decisions` decode steps by mode and the gate's reason (CUDA only).
    """

    num_decode_steps: int = 0
    num_shared_steps: int = 0
    num_shared_rows: int = 0
    num_kv_tokens: int = 0
    num_saved_tokens: int = 0
    fallbacks: dict[str, int] = {}
    decisions: dict[str, int] = {}

    def decode_step(
        self, seq_lens: Sequence[int], segments: Sequence[Segment], num_saved: int
    ) -> None:
        """A decode step was planned over `segments`; of the tokens of its rows it does
        not read `num_saved` again."""
        self.num_decode_steps += 1
        self.num_shared_steps += bool(segments)
        self.num_shared_rows += len({row for s in segments for row in s.rows})
        self.num_kv_tokens += sum(seq_lens)
        self.num_saved_tokens += num_saved

    def decided(self, mode: str, reason: str) -> None:
        """The gate decided about a decode step."""
        key = f"{mode}: {reason}"
        self.decisions[key] = self.decisions.get(key, 0) + 1

    def fell_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
