"""Which branch belongs to which request, and what a branch found in the tree.

One `RequestState` per group lives from the first branch until no branch has been
alive for `fork_pin_ttl_s`, so that the next stage of a program finds its first
token, its token count and its deadlines again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sglang_taper.policy.state import BranchState, RequestState
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta

# Groups remembered at most; the ones idle for longest are forgotten first.
MAX_GROUPS = 65_536
SWEEP_EVERY_MS = 1000.0
# Branches of a group whose tokens are kept to tell what a new one could share.
NUM_SEEN_BRANCHES = 4


class Group:
    """A grouped request: its state, its living branches, what it has computed."""

    __slots__ = ("aborted_ms", "idle_since_ms", "num_live", "seen_tokens", "state")

    def __init__(self, state: RequestState, now_ms: float) -> None:
        self.state = state
        self.num_live = 0
        self.aborted_ms = -math.inf
        self.idle_since_ms = now_ms
        # Token ids of the newest branches: what a new one may hope to share.
        self.seen_tokens: list[Any] = []


class Branch:
    """What hangs on a `Req` as `req.taper`: policy state plus counters."""

    __slots__ = (
        "ended",
        "group",
        "meta",
        "num_recomputed",
        "num_shared",
        "prefilled",
        "state",
    )

    def __init__(
        self, meta: BranchMeta, state: BranchState, group: Group | None
    ) -> None:
        self.meta = meta
        self.state = state
        self.group = group
        self.ended = False
        self.prefilled = False
        self.num_shared = 0
        self.num_recomputed = 0

    @property
    def is_prefix_only(self) -> bool:
        """It only puts its prompt into the radix tree: its token is not counted."""
        return self.state.max_new_tokens == 0


class GroupTable:
    """All remembered groups of this scheduler."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_ms = ttl_s * 1000.0
        self.groups: dict[str, Group] = {}
        self.num_live_groups = 0
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
        if group:
            self.num_live_groups += group.num_live == 0
            group.num_live += 1
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
        return group

    def end(self, branch: Branch, now_ms: float) -> None:
        """The branch is finished or aborted. Idempotent."""
        if branch.ended:
            return
        branch.ended = True
        branch.state.end()
        if (group := branch.group) is not None:
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

    def settle(self, now_ms: float) -> None:
        """Nothing runs or waits any more: no branch is alive (also repairs a count
        that an unusual way out of the queue has left behind)."""
        for group in self.groups.values():
            self._set_live(group, 0, now_ms)

    def clear(self) -> None:
        self.groups.clear()
        self.num_live_groups = 0

    def abort(self, name: str, now_ms: float) -> None:
        """The group was aborted at `now_ms`, a time that all ranks were told."""
        if (group := self.groups.get(name)) is not None:
            group.aborted_ms = now_ms


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


def note_prefill(branch: Branch, prompt: Any, num_cached: int) -> None:
    """Count what the branch shares and what of it was computed again.

    `prompt` is an `array('q')` of token ids, `num_cached` how many of them were found
    in the tree. Shared: what this request has already computed and the branch starts
    with (its longest common prefix with the newest branches of its group).
    """
    if branch.prefilled:
        return
    branch.prefilled = True
    branch.state.shared_tokens = num_cached
    if (group := branch.group) is None:
        return
    known = max((common_prefix(prompt, seen) for seen in group.seen_tokens), default=0)
    branch.num_shared = min(num_cached, known)
    branch.num_recomputed = known - branch.num_shared
    _remember(group, prompt)


def note_finish(branch: Branch, prompt: Any, output: Any) -> None:
    """Later stages may start with what this branch has generated."""
    if branch.group is not None and len(output):
        _remember(branch.group, prompt + output)


def _remember(group: Group, tokens: Any) -> None:
    group.seen_tokens = [*group.seen_tokens[1 - NUM_SEEN_BRANCHES :], tokens]


def common_prefix(left: Any, right: Any) -> int:
    """Length of the longest common prefix of two `array('q')`."""
    length = min(len(left), len(right))
    if not length:
        return 0
    one = np.frombuffer(left, dtype=np.int64, count=length)
    two = np.frombuffer(right, dtype=np.int64, count=length)
    different = np.flatnonzero(one != two)
    return int(different[0]) if different.size else length
