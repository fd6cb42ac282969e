"""The siblings of one fork: who is still to come, who has ended, how many suffice."""

from __future__ import annotations

from sglang_taper.protocol import BranchMeta


class Fork:
    """The siblings of one fork: how many there are to be, which have ended.

    `parent` is the rid of the request they continue, when the client names it. Once
    `first_k` of them have finished, the others are not wanted any more.
    """

    __slots__ = (
        *("ended", "first_k", "key", "num_finished", "num_live", "parent", "width"),
    )

    def __init__(self, meta: BranchMeta) -> None:
        self.key = fork_key(meta)
        self.width = meta.width
        self.parent = meta.parent
        self.first_k = meta.first_k
        self.num_live = 0
        self.num_finished = 0
        self.ended: set[int] = set()

    @property
    def is_decided(self) -> bool:
        """As many have finished as were asked for."""
        return self.first_k is not None and self.num_finished >= self.first_k

    def finish_one(self) -> bool:
        """One more has finished. True: it is the one that decides the fork."""
        was_decided = self.is_decided
        self.num_finished += 1
        return self.is_decided and not was_decided

    @property
    def is_complete(self) -> bool:
        """Every sibling has come and ended."""
        return self.num_live == 0 and len(self.ended) >= self.width


ForkKey = tuple[str, int, int, str | None]


def fork_key(meta: BranchMeta) -> ForkKey:
    """Names the fork that made this branch, within its group."""
    return ("fork", meta.depth, meta.stage, meta.parent)
