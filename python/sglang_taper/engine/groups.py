"""Which branch belongs to which request, and what a branch found in the tree.

One `RequestState` per group lives from the first branch until no branch has been
alive for `fork_pin_ttl_s`, so that the next stage of a program finds its first
token, its token count and its deadlines again.
"""

from __future__ import annotations

import math
from typing import Any

from sglang_taper.engine.headers import scope_in, scoped_name
from sglang_taper.engine.records import BranchRecord
from sglang_taper.engine.sharing import Seen
from sglang_taper.engine.siblings import Fork, ForkKey, fork_key
from sglang_taper.policy.state import BranchState, RequestState
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta

# Groups remembered at most; the ones idle for longest are forgotten first.
MAX_GROUPS = 65_536
SWEEP_EVERY_MS = 1000.0
# Requests and open forks a group remembers; it may go on for days.
MAX_REMEMBERED = 16_384


class Group:
    """A grouped request: its state, its living branches, what it has computed."""

    __slots__ = (
        "aborted_ms",
        "forks",
        "idle_since_ms",
        "num_live",
        "parents",
        "seen",
        "state",
    )

    def __init__(self, state: RequestState, now_ms: float) -> None:
        self.state = state
        self.num_live = 0
        self.aborted_ms = -math.inf
        self.idle_since_ms = now_ms
        # The newest branches: what a new one may hope to share.
        self.seen: list[Seen] = []
        self.forks: dict[ForkKey, Fork] = {}
        # By request id: the one it names as its parent, also of ended branches, so
        # that a chain of descent does not break.
        self.parents: dict[str, str | None] = {}

    def fork_of(self, meta: BranchMeta) -> Fork:
        """The fork that made this branch; opened by its first sibling to come."""
        fork = self.forks.get(fork_key(meta))
        if fork is None:
            fork = Fork(meta)
            self.forks[fork.key] = fork
            _forget_oldest(self.forks)
        return fork

    def close(self, fork: Fork | None) -> None:
        """Forget `fork` if it is complete."""
        if fork is not None and fork.is_complete:
            self.forks.pop(fork.key, None)


class Branch:
    """What hangs on a `Req` as `req.taper`: policy state plus counters."""

    record: BranchRecord

    __slots__ = (
        "cancelled_by",
        "ended",
        "fork",
        "group",
        "is_aliased",
        "is_let_go",
        "is_probed",
        "meta",
        "num_copied",
        "num_evicted",
        "num_pinned",
        "num_prefilled",
        "num_recomputed",
        "num_shared",
        "prefill_held_ms",
        "prefilled",
        "record",
        "seen_ms",
        "state",
        "waits_for_page",
    )

    def __init__(
        self, meta: BranchMeta, state: BranchState, group: Group | None
    ) -> None:
        self.meta = meta
        self.state = state
        self.group = group
        is_sibling = group is not None and meta.width > 1 and not self.is_prefix_only
        self.fork = group.fork_of(meta) if group and is_sibling else None
        self.ended = False
        # Why the server itself ended it: None, or "first_k".
        self.cancelled_by: str | None = None
        self.prefilled = False
        # Whether members of the group were asked for what it shares with them.
        self.is_probed = False
        self.waits_for_page = False
        self.is_aliased = False
        # When its prefill was first looked at, and how long it was held.
        self.seen_ms: float | None = None
        self.is_let_go = False
        self.prefill_held_ms = 0.0
        self.num_shared = 0
        self.num_recomputed = 0
        self.num_evicted = 0
        self.num_pinned = 0
        self.num_copied = 0
        self.num_prefilled = 0

    @property
    def is_prefix_only(self) -> bool:
        """It only puts its prompt into the radix tree: its token is not counted."""
        return self.state.max_new_tokens == 0

    @property
    def state_key(self) -> tuple[int, int, int]:
        """Names the program state it belongs to, within its group; the root keeps
        its name over all its stages."""
        meta = self.meta
        return (meta.depth, meta.stage if meta.depth else 0, meta.branch)


class GroupTable:
    """All remembered groups of this scheduler."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_ms = ttl_s * 1000.0
        self.groups: dict[str, Group] = {}
        self.num_live_groups = 0
        # Whose groups there are, or were at the last sweep.
        self._scopes: set[str] = set()
        self._swept_ms = -math.inf

    def attach(
        self,
        rid: str,
        meta: BranchMeta,
        params: PolicyParams,
        arrival_ms: float,
        max_new_tokens: int,
    ) -> Branch:
        """The branch of a new `Req`; opens its group if it is the first."""
        group = self._group_of(meta, params, arrival_ms)
        state = group.state if group else _request_state(rid, meta, params, arrival_ms)
        branch = Branch(meta, BranchState(state, meta.branch, 0, max_new_tokens), group)
        branch.record = BranchRecord(rid, meta, branch.state, arrival_ms)
        if group:
            group.parents[rid] = meta.parent
            _forget_oldest(group.parents)
            self.num_live_groups += group.num_live == 0
            group.num_live += 1
        if branch.fork:
            branch.fork.num_live += 1
        return branch

    def _group_of(
        self, meta: BranchMeta, params: PolicyParams, now_ms: float
    ) -> Group | None:
        if meta.group is None:
            return None
        group = self.groups.get(meta.group)
        if group is None:
            self.forget_idle(now_ms)
            state = _request_state(meta.group, meta, params, now_ms)
            group = self.groups[meta.group] = Group(state, now_ms)
            self._scopes.add(scope_in(meta.group))
        return group

    def end(self, branch: Branch, now_ms: float) -> None:
        """The branch is finished or aborted. Idempotent."""
        if branch.ended:
            return
        branch.ended = True
        branch.state.end()
        if branch.fork is not None:
            branch.fork.num_live -= 1
            branch.fork.ended.add(branch.meta.branch)
        if (group := branch.group) is not None:
            group.close(branch.fork)
            self._set_live(group, max(0, group.num_live - 1), now_ms)

    def _set_live(self, group: Group, num_live: int, now_ms: float) -> None:
        if group.num_live and not num_live:
            self.num_live_groups -= 1
            group.idle_since_ms = now_ms
        group.num_live = num_live

    def forget_idle(self, now_ms: float) -> None:
        """Forget groups idle for longer than the TTL, or beyond `MAX_GROUPS`.

        Looks at all groups, so not more than once in `SWEEP_EVERY_MS`.
        """
        if now_ms - self._swept_ms < SWEEP_EVERY_MS:
            return
        self._swept_ms = now_ms
        idle = [
            (group.idle_since_ms, name)
            for name, group in self.groups.items()
            if group.num_live == 0
        ]
        surplus = len(self.groups) - MAX_GROUPS
        for position, (since_ms, name) in enumerate(sorted(idle)):
            if now_ms - since_ms > self.ttl_ms or position < surplus:
                del self.groups[name]
        self._scopes = {scope_in(name) for name in self.groups}

    def settle(self, now_ms: float) -> None:
        """Nothing runs or waits any more: no branch is alive (also repairs a count
        that an unusual way out of the queue has left behind)."""
        for group in self.groups.values():
            self._set_live(group, 0, now_ms)

    def clear(self) -> None:
        self.groups.clear()
        self.num_live_groups = 0

    def named(self, group: str, scope: str | None) -> list[str]:
        """The remembered groups that a client calls `group`, of one scope or of all."""
        scopes = self._scopes if scope is None else (scope,)
        names = [scoped_name(scope, group) for scope in sorted(scopes)]
        return [name for name in names if name in self.groups]

    def abort(self, name: str, now_ms: float) -> Group | None:
        """The group was aborted at `now_ms`, a time that all ranks were told."""
        if (group := self.groups.get(name)) is not None:
            group.aborted_ms = now_ms
        return group


def _forget_oldest(remembered: dict[Any, Any]) -> None:
    if len(remembered) > MAX_REMEMBERED:
        del remembered[next(iter(remembered))]


def arrives_aborted(branch: Branch, called_ms: float | None) -> bool:
    """Whether its group was aborted while this sample was on its way.

    SGLang sends the samples of `n>1` when their prompt is computed. `called_ms` is
    when the client made that call; None for other requests, which come as they are
    sent: they belong to what the client does after the abort.
    """
    if branch.group is None or called_ms is None:
        return False
    return called_ms <= branch.group.aborted_ms


def _request_state(
    name: str, meta: BranchMeta, params: PolicyParams, arrival_ms: float
) -> RequestState:
    return RequestState(
        group=name,
        arrival_ms=arrival_ms,
        ttft_slo_ms=meta.ttft_slo_ms or params.ttft_slo_ms,
        tpot_slo_ms=meta.tpot_slo_ms or params.tpot_slo_ms,
        priority=meta.priority or 1.0,
    )
