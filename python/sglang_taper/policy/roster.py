"""Tells requests when they enter and leave the decode batch."""

from __future__ import annotations

from sglang_taper.policy.state import BranchState, RequestState


class DecodeRoster:
    """The rows of the decode batch as of the last step, by request."""

    def __init__(self) -> None:
        self._states: list[BranchState] = []
        self._rows_of: dict[RequestState, int] = {}

    def sync(self, states: list[BranchState], now_ms: float) -> bool:
        """The batch now consists of `states`. Cheap when nothing changed.

        Returns whether a row has come, gone or moved.
        """
        if states == self._states:
            return False
        self._states = states
        rows_of: dict[RequestState, int] = {}
        for state in states:
            rows_of[state.request] = rows_of.get(state.request, 0) + 1
        for request in self._rows_of.keys() - rows_of.keys():
            request.leave_decode(now_ms)
        for request in rows_of:
            if request not in self._rows_of:
                request.enter_decode(now_ms)
        self._rows_of = rows_of
        return True

    def remove(self, state: BranchState, now_ms: float) -> None:
        """A branch has ended; its request may have no row left."""
        if state not in self._states:
            return
        self.sync([other for other in self._states if other is not state], now_ms)
