"""A forward that can be checked: each KV slot holds a hash of all tokens up to it.

The hash of a position is computed from the slot that the row's table names for the
position before, as attention would read it, and the next token is sampled from it. So
a slot that was shared, copied, published, freed or written wrongly gives a wrong hash
there and in all that is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_taper.engine.attention.counting import AttentionCounters
from sglang_taper.engine.attention.gate import StepGate
from sglang_taper.engine.attention.prefixes import StepPrefixes
from sglang_taper.engine.attention.shared_steps import SharedSteps
from sglang_taper.engine.attention.slot_copies import SlotCopies
from sglang_taper.ops.segments import Segment, StepLayout, check_layout

# Hashes are float32 in the pool, exact below 2 ** 24.
MODULUS = 8_388_593
FACTOR = 4099
VOCAB_SIZE = 32
STOP_TOKEN = 31


def next_hash(previous: int, token: int) -> int:
    return (previous * FACTOR + token + 1) % MODULUS


def sample(hashed: int, seed: int | None) -> int:
    """The token after a prefix: the same for equal prefixes and seeds."""
    return next_hash(hashed, 7919 * (seed or 0)) // 5 % VOCAB_SIZE


def first_hash(req: Any) -> int:
    """The hash before any token: another one in each namespace of the tree."""
    return len(req.cache_salt or "")


def hashes_of(req: Any, known: list[int]) -> list[int]:
    """Append to `known`, the hashes of the first tokens of `req`, those of the rest."""
    hashed = known[-1] if known else first_hash(req)
    for token in (req.origin_input_ids + req.output_ids)[len(known) :]:
        hashed = next_hash(hashed, token)
        known.append(hashed)
    return known


class NoEvent:
    """Copies on the CPU have happened when they return."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class AnyTree:
    """A decoder that could read any tree once."""

    name = measured_as = "any tree"

    def usable(self, segments: Any, num_rows: int) -> tuple[Segment, ...]:
        return tuple(segments)

    def fits(self, segments: Any, seq_lens: Any) -> bool:
        return True


class SharedReads:
    """What backends that read a shared prefix once would read: one that knows all slots
    at once, as on the CPU, and `delayed`, one that waits for copies, as on CUDA."""

    shared_prefix_attention = "checked"
    may_share, waits_for_slots = True, False

    def __init__(self, table: torch.Tensor, kv: torch.Tensor) -> None:
        self.step_prefixes = StepPrefixes()
        self.attention_counters = AttentionCounters()
        self._table, self._kv = table, kv
        decoder: Any = AnyTree()
        self.delayed = SharedSteps(
            StepGate(always=True), decoder, SlotCopies(table, NoEvent)
        )

    def announce(self, reqs: list[Any], *tensors: Any) -> None:
        self.step_prefixes.announce(reqs)
        self.delayed.announce(reqs, *tensors)

    def segments_among(self, reqs: list[Any], seq_lens: tuple[int, ...]) -> Any:
        return self.step_prefixes.segments_among(reqs, seq_lens, self._read_slots)

    def would_not_share(self, reqs: list[Any], seq_lens: list[int]) -> bool:
        return False

    def _read_slots(self, member: Any) -> Any:
        return self._table[member.row, : member.num_tokens].numpy()

    def check(self, indices: torch.Tensor, seq_lens: list[int]) -> None:
        """Fails when a row would read KV in a segment that is not its own."""
        rows = indices.tolist()
        found = self.step_prefixes.segments(rows, seq_lens, self._read_slots)
        self._check(found, rows, seq_lens)
        self.attention_counters.decode_step(seq_lens, found, num_saved=0)
        delayed = self.delayed.segments_of(indices)
        assert bool(delayed) == self.delayed.shares_now
        self._check(delayed, rows, seq_lens)

    def _check(
        self, found: Sequence[Segment], rows: list[int], seq_lens: list[int]
    ) -> None:
        check_layout(StepLayout(tuple(found), tuple(seq_lens)))
        for segment in found:
            part = slice(segment.start, segment.end)
            read = self._kv[self._table[rows[segment.rows[0]], part].long()]
            for row in segment.rows:
                own = self._kv[self._table[rows[row], part].long()]
                assert torch.equal(read, own)


class TruthWorker:
    """SGLang's model worker, as far as its scheduler looks at it."""

    def __init__(self, rows: Any, kv: Any) -> None:
        self.model_runner = self
        self.canary_manager = None
        self.prefill_aware_swa = False
        self._table = rows.req_to_token
        self.kv = kv.get_key_buffer(0).view(-1)
        self.attn_backend = SharedReads(self._table, self.kv)

    def get_decode_cuda_graph_bs(self) -> list[int]:
        return []

    def forward_batch_generation(
        self, batch: Any, **kwargs: Any
    ) -> GenerationBatchResult:
        """Write the KV of `batch` and sample; fails on a slot that is not the row's."""
        lengths = batch.seq_lens.tolist()
        if batch.forward_mode.is_decode():
            self.attn_backend.check(batch.req_pool_indices, lengths)
        starts = [length - 1 for length in lengths]
        if batch.forward_mode.is_extend():
            starts = batch.prefix_lens
        sampled, offset = [], 0
        for index, (start, end) in enumerate(zip(starts, lengths, strict=True)):
            part = slice(offset, offset + end - start)
            offset = part.stop
            slots = self._table[batch.req_pool_indices[index], :end].long()
            assert torch.equal(slots[start:], batch.out_cache_loc[part])
            req = batch.reqs[index]
            before = int(self.kv[slots[start - 1]]) if start else first_hash(req)
            hashed = self._write(slots[start:], before, batch.input_ids[part].tolist())
            sampled.append(sample(hashed, req.sampling_params.sampling_seed))
        assert offset == len(batch.input_ids) == len(batch.out_cache_loc)
        return GenerationBatchResult(next_token_ids=torch.tensor(sampled))

    def _write(self, slots: torch.Tensor, hashed: int, tokens: list[int]) -> int:
        written = []
        for token in tokens:
            hashed = next_hash(hashed, token)
            written.append(hashed)
        self.kv[slots] = torch.tensor(written, dtype=self.kv.dtype)
        return hashed
