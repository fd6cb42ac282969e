"""KV slots of new branches, brought to the host without waiting for the device.

The request table lies on the device, and what rows share is decided on the host. So the
slots of a branch are copied when it is first asked about, on the current stream, into
pinned memory; until the copy has arrived the answer is "not known yet" and the branch
shares nothing.

Whether it has arrived is not asked of the device: ranks of one tensor-parallel group
would get different answers, read different things once and replay different graphs. The
answer is the same on all of them, `PASSES_UNTIL_READ` passes later. By then the results
of a pass that was launched after the copy have been processed, under overlap scheduling
too, so there is nothing left to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from sglang_taper.engine.attention.prefixes import Key, Member

PASSES_UNTIL_READ = 2


class Copy(msgspec.Struct, frozen=True):
    """A copy on its way: where to, how to know, and before which pass it was begun."""

    member: Member
    slots: torch.Tensor
    done: Any
    num_passes: int


class SlotCopies:
    """Reads slots of members of `req_to_token` [R, C] int32, on any device.

    `make_event` makes what `torch.cuda.Event` is. Called with a member: its slots, or
    None while they are on their way.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        make_event: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._table = req_to_token
        self._make_event = make_event
        self._copies: dict[Key, Copy] = {}
        self._num_passes = 0

    @property
    def pending(self) -> bool:
        """Whether a copy has been begun and not been read."""
        return bool(self._copies)

    def passed(self) -> None:
        """What the next pass reads has been decided."""
        self._num_passes += 1
        gone = [k for k, copy in self._copies.items() if not copy.member.is_current]
        for key in gone:
            del self._copies[key]

    def __call__(self, member: Member) -> np.ndarray | None:
        copy = self._copies.get(member.key)
        if copy is None:
            self._copies[member.key] = self._begin(member)
            return None
        if self._num_passes - copy.num_passes < PASSES_UNTIL_READ:
            return None
        del self._copies[member.key]
        copy.done.synchronize()
        # out of pinned memory, which is scarce
        slots: np.ndarray = copy.slots.numpy().copy()
        return slots

    def _begin(self, member: Member) -> Copy:
        source = self._table[member.row, : member.num_tokens]
        slots = torch.empty(
            len(source), dtype=source.dtype, pin_memory=source.device.type == "cuda"
        )
        slots.copy_(source, non_blocking=True)
        done = self._make_event()
        done.record()
        return Copy(member, slots, done, self._num_passes)
