"""Which rows of a decode step share how many KV slots, from our own group records.

Rows of one group are compared slot by slot when one of them is new; what they have in
common stays true while they keep their rows, because a request's tokens do not change.
Reference counts are never asked: equal counts do not mean equal slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglang_taper.ops.segments import Segment, segments_of

if TYPE_CHECKING:
    from sglang_taper.engine.groups import Group

# Shorter segments are left to the rows: a part of its own costs more than it saves.
MIN_SEGMENT_TOKENS = 16

# A request in a row of the request table, from its admission to its retraction: it may
# get the same row again, with other slots.
Key = tuple[int, int, int]


def key_of(req: Any) -> Key:
    return (id(req), req.kv.req_pool_idx, req.retraction_count)


class Member(msgspec.Struct, frozen=True):
    """A branch as it was when its slots were compared."""

    req: Any
    key: Key
    num_tokens: int

    @property
    def row(self) -> int:
        return self.key[1]

    @property
    def is_current(self) -> bool:
        """Whether the branch still owns that row of the request table."""
        ended = self.req.taper is None or self.req.taper.ended
        return not ended and key_of(self.req) == self.key


# The KV slots of a branch's first `num_tokens` tokens, on the host; None while they are
# still on their way there.
ReadSlots = Callable[[Member], "np.ndarray | None"]


class SlotOrder:
    """The rows of one group sorted by their slots, and what neighbours share.

    A row whose slots are not known yet shares nothing.
    """

    def __init__(self) -> None:
        self._members: dict[Key, Member] = {}
        self._slots: dict[Key, np.ndarray] = {}
        self._common: list[int] = []

    def among(
        self, present: dict[Key, Member], read: ReadSlots
    ) -> tuple[list[Key], list[int]]:
        """Sorted keys of the `present` rows, and what adjacent ones have in common."""
        if not present.keys() <= self._members.keys():
            self._sort(present, read)
        keys: list[Key] = []
        common: list[int] = []
        shared = 0  # with the last present row
        for position, key in enumerate(self._members):
            if position:
                shared = min(shared, self._common[position - 1])
            if key in present:
                common += [shared] * bool(keys)
                keys.append(key)
                shared = self._members[key].num_tokens
        return keys, common

    def _sort(self, present: dict[Key, Member], read: ReadSlots) -> None:
        members = {k: m for k, m in self._members.items() if m.is_current}
        slots = {key: self._slots[key] for key in members}
        for key in present.keys() - members.keys():
            found = read(present[key])
            if found is not None:
                members[key], slots[key] = present[key], found
        # big-endian bytes compare as the numbers do
        order = sorted(members, key=lambda key: slots[key].astype(">i4").tobytes())
        self._members = {key: members[key] for key in order}
        self._slots = slots
        self._common = [
            num_equal(slots[one], slots[two]) for one, two in pairwise(order)
        ]


def num_equal(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the common prefix of two lists of slots."""
    length = min(len(one), len(two))
    different = np.flatnonzero(one[:length] != two[:length])
    return int(different[0]) if different.size else length


class StepPrefixes:
    """The branches of the batch that is about to run, told by the scheduler.

    The backend asks for the segments of a forward pass; it gets none unless the pass
    has the rows that were told, so a pass of anybody else never shares.
    """

    def __init__(self) -> None:
        self._reqs: Sequence[Any] = ()
        self._rows: list[int] = []
        self._orders: dict[Group, SlotOrder] = {}

    def announce(self, reqs: Sequence[Any]) -> None:
        """`reqs` run next, in this order."""
        self._reqs = tuple(reqs)
        self._rows = [req.kv.req_pool_idx for req in reqs]

    def segments(
        self, rows: list[int], seq_lens: Sequence[int], read: ReadSlots
    ) -> list[Segment]:
        """What the rows of a pass share: `rows` of the request table, in its order."""
        if rows != self._rows:
            return []
        return self.segments_among(self._reqs, seq_lens, read)

    def segments_among(
        self, reqs: Sequence[Any], seq_lens: Sequence[int], read: ReadSlots
    ) -> list[Segment]:
        """What the rows of `reqs` share; the newest of their `seq_lens` tokens need
        not have a slot yet."""
        self._forget_ended()
        found: list[Segment] = []
        for group, members in _rows_by_group(reqs).items():
            if len(members) > 1:
                found += self._group_segments(group, reqs, members, seq_lens, read)
        return found

    def _group_segments(
        self,
        group: Group,
        reqs: Sequence[Any],
        rows: list[int],
        seq_lens: Sequence[int],
        read: ReadSlots,
    ) -> list[Segment]:
        present: dict[Key, Member] = {}
        row_of: dict[Key, int] = {}
        for row in rows:
            req = reqs[row]
            key = key_of(req)
            # the newest token is its row's own
            present[key] = Member(req, key, seq_lens[row] - 1)
            row_of[key] = row
        order = self._orders.setdefault(group, SlotOrder())
        keys, common = order.among(present, read)
        return segments_of([row_of[key] for key in keys], common, MIN_SEGMENT_TOKENS)

    def _forget_ended(self) -> None:
        for group in [group for group in self._orders if not group.num_live]:
            del self._orders[group]


def _rows_by_group(reqs: Sequence[Any]) -> dict[Group, list[int]]:
    rows: dict[Group, list[int]] = {}
    for row, req in enumerate(reqs):
        branch = getattr(req, "taper", None)
        if branch is not None and branch.group is not None:
            rows.setdefault(branch.group, []).append(row)
    return rows
