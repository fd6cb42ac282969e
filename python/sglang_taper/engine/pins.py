"""Locks that keep the prefix of a fork in the tree while nobody runs on it.

A running branch locks its own path. A pin covers the gaps: between the end of a
parent and the arrival of its children, between siblings that come one by one, and
while branches that were retracted wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang_taper.engine.groups import Branch, Group
from sglang_taper.engine.prefix import PrefixTree, tokens_of
from sglang_taper.engine.siblings import Fork

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Pin:
    """One lock. `is_announced`: a fork on it is known to come, or to go on."""

    __slots__ = ("group", "is_announced", "lock", "num_tokens", "rid", "since_ms")

    def __init__(
        self,
        group: Group,
        rid: str,
        lock: Any,
        num_tokens: int,
        since_ms: float,
        is_announced: bool,
    ) -> None:
        self.group = group
        self.rid = rid
        self.lock = lock
        self.num_tokens = num_tokens
        self.since_ms = since_ms
        self.is_announced = is_announced

    @property
    def idle_since_ms(self) -> float:
        return max(self.since_ms, self.group.idle_since_ms)


# A pin belongs to a place in a program: its group and a state of it, or a fork.
PinKey = tuple[Group, Any]


class PinTable:
    """All pins of this scheduler, oldest first."""

    def __init__(self, prefix: PrefixTree, max_tokens: int) -> None:
        self._prefix = prefix
        self._max_tokens = max_tokens if max_tokens and prefix.is_shared else 0
        self._pins: dict[PinKey, Pin] = {}
        self._by_group: dict[Group, dict[PinKey, Pin]] = {}
        # Sum over pins; what two of them share counts twice.
        self.num_tokens = 0
        self.num_dropped = 0
        self.num_expired = 0
        self._swept_ms = -math.inf

    def __len__(self) -> int:
        return len(self._pins)

    def num_whole(self, num_tokens: int) -> int:
        """As many of the leading tokens as the tree can hold: whole pages."""
        page = int(self._prefix.tree.page_size)
        return num_tokens // page * page

    def pin(
        self,
        key: PinKey,
        req: Req,
        tokens: Any,
        now_ms: float,
        is_announced: bool,
    ) -> None:
        """Lock what the tree holds of `tokens`; replaces an older pin of `key`.

        Over the limit the oldest idle pins go first; when that is not enough this
        pin is not taken, and the fork recomputes what is evicted meanwhile.
        """
        if not self._max_tokens:
            return
        found = self._prefix.match_all(req, tokens)
        if not found.num_matched:
            return self.unpin(key)
        lock = self._prefix.tree.lock(found.node)
        self.unpin(key)
        if not self._make_room(found.num_matched, is_announced):
            self._prefix.tree.unlock(lock)
            self.num_dropped += 1
            return None
        group, _ = key
        pin = Pin(group, req.rid, lock, found.num_matched, now_ms, is_announced)
        self._pins[key] = self._by_group.setdefault(group, {})[key] = pin
        self.num_tokens += pin.num_tokens
        return None

    def _make_room(self, num_tokens: int, is_announced: bool) -> bool:
        """Give up as many idle pins as needed, or none when they do not suffice.

        A pin on which no fork is known to come does not displace one that is.
        """
        surplus = self.num_tokens + num_tokens - self._max_tokens
        kinds = (False, True) if is_announced else (False,)
        victims = []
        for key in self._oldest(kinds, only_idle=True):
            if surplus <= 0:
                break
            victims.append(key)
            surplus -= self._pins[key].num_tokens
        if surplus > 0:
            return False
        for key in victims:
            self._drop(key)
        return True

    def unpin(self, key: PinKey) -> None:
        pin = self._pins.pop(key, None)
        if pin is None:
            return
        group, _ = key
        del self._by_group[group][key]
        if not self._by_group[group]:
            del self._by_group[group]
        self.num_tokens -= pin.num_tokens
        self._prefix.tree.unlock(pin.lock)

    def drop_oldest_idle(self, only_unannounced: bool = False) -> bool:
        """Give up one pin of a group without a living branch; False: there is none.

        Those on which no fork is known to come go first.
        """
        return self._drop_oldest((False,) if only_unannounced else (False, True), True)

    def drop_oldest(self) -> bool:
        """Give up one pin, of a living group only when no idle one is left.

        For when nothing can make progress otherwise: a branch that waits counts as
        living, and must not wait for the pin of its own group.
        """
        return self.drop_oldest_idle() or self._drop_oldest((False, True), False)

    def _drop_oldest(self, announced: Sequence[bool], only_idle: bool) -> bool:
        key = next(self._oldest(announced, only_idle), None)
        if key is not None:
            self._drop(key)
        return key is not None

    def _oldest(self, announced: Sequence[bool], only_idle: bool) -> Iterator[PinKey]:
        for kind in announced:
            for key, pin in self._pins.items():
                is_idle = pin.group.num_live == 0
                if pin.is_announced is kind and (is_idle or not only_idle):
                    yield key

    def _drop(self, key: PinKey) -> None:
        self.unpin(key)
        self.num_dropped += 1

    def expire(self, now_ms: float, ttl_ms: float) -> bool:
        """Give up the pins of groups that have been idle for longer than the TTL.

        Looks at all pins, so only once per tenth of the TTL. True: some were given up.
        """
        if now_ms - self._swept_ms < ttl_ms / 10:
            return False
        self._swept_ms = now_ms
        expired = [
            key
            for key, pin in self._pins.items()
            if pin.group.num_live == 0 and now_ms - pin.idle_since_ms > ttl_ms
        ]
        for key in expired:
            self.unpin(key)
        self.num_expired += len(expired)
        return bool(expired)

    def unpin_requests(self, group: Group, rids: set[str]) -> None:
        """Give up the pins that these requests of `group` have left."""
        for key, pin in self.of(group):
            if pin.rid in rids:
                self.unpin(key)

    def unpin_group(self, group: Group) -> None:
        for key, _ in self.of(group):
            self.unpin(key)

    def of(self, group: Group) -> list[tuple[PinKey, Pin]]:
        """The pins of `group` as they are now, oldest first."""
        return list(self._by_group.get(group, {}).items())

    def forget(self) -> None:
        """The tree was reset: the locks are void."""
        self._pins.clear()
        self._by_group.clear()
        self.num_tokens = 0


def branch_started(pins: PinTable, branch: Branch, req: Req, now_ms: float) -> None:
    """Keep what siblings share from the first result of the first of them on, so that
    it outlives this branch, or its retraction, while others run or come."""
    group, fork = branch.group, branch.fork
    if group is None or fork is None or branch.ended:
        return
    pinned = [pin.num_tokens for key, pin in pins.of(group) if _is_of((key, pin), fork)]
    # The first has computed what the others share; what those find tells how far.
    if pinned and max(pinned) >= pins.num_whole(req.cached_tokens):
        return
    shared = req.origin_input_ids[: req.cached_tokens or None]
    pins.pin((group, fork.key), req, shared, now_ms, True)


def branch_ended(
    pins: PinTable, branch: Branch, req: Req, aborted: bool, now_ms: float
) -> None:
    """Pin, keep or unpin after a branch has ended and its group knows it.

    A request of a serial stage, or one that only commits a prefix, leaves a pin on
    all it has computed. The last branch of a fork takes the pins of its fork away.
    """
    group, fork = branch.group, branch.fork
    if group is None:
        return
    if aborted and group.num_live == 0:
        pins.unpin_group(group)
    elif aborted and fork is None:
        return
    elif fork is None:
        key = (group, branch.state_key)
        pins.pin(key, req, tokens_of(req), now_ms, branch.is_prefix_only)
    elif fork.is_complete:
        _unpin_fork(pins, group, fork)


def _unpin_fork(pins: PinTable, group: Group, fork: Fork) -> None:
    for pinned in pins.of(group):
        if _is_of(pinned, fork):
            pins.unpin(pinned[0])


def _is_of(pinned: tuple[PinKey, Pin], fork: Fork) -> bool:
    """Whether it is the pin of `fork`, or the one on its parent.

    A client that names no parent has one line of forks: all pins of its group.
    """
    key, pin = pinned
    return key[1] == fork.key or fork.parent in (None, pin.rid)
