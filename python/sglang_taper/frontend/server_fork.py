"""The client's side of `POST /fork`: its body, its events, what to cancel."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any

from sglang_taper.ids import new_rid

# What a branch adds: text, token ids, or an object as the route takes it.
Part = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class ForkEvent:
    """What one branch (None: the join) has written since its last event.

    `finish_reason` is SGLang's object in the last event, else None; `meta_info` comes
    with it, and is empty for a branch that was refused.
    """

    branch: int | None
    rid: str
    text: str
    finish_reason: Mapping[str, Any] | None
    meta_info: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        """Whether this is the branch's last event."""
        return self.finish_reason is not None


@dataclass
class BranchProgress:
    """What a branch (None: the join) has written so far.

    `finish_reason` is None while it runs; `meta_info` is that of its last event.
    """

    branch: int | None
    rid: str
    text: str = ""
    finish_reason: Mapping[str, Any] | None = None
    meta_info: Mapping[str, Any] = field(default_factory=dict)


# From what every branch has written, in order, the indices of those to cancel.
WhatToCancel = Callable[[Sequence[BranchProgress]], Iterable[int]]


@dataclass(frozen=True)
class ForkResult:
    """The answer of the route: the last event of each branch, in order, and of the
    join, token counts, and what was done for the request."""

    branches: list[dict[str, Any]]
    usage: dict[str, Any]
    taper: dict[str, Any]
    join: dict[str, Any] | None = None

    @property
    def texts(self) -> list[str]:
        """What each branch has written."""
        return [branch["text"] for branch in self.branches]


def fork_body(
    prompt: Part,
    branches: Sequence[Part],
    sampling_params: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The body of the call. Every branch has a request id, to be cancelled by."""
    parts = [{"rid": new_rid(), **_named(part)} for part in branches]
    params = {"sampling_params": dict(sampling_params or {})}
    return {**_named(prompt), "branches": parts, **params, **fields}


def _named(part: Part) -> dict[str, Any]:
    if isinstance(part, Mapping):
        return dict(part)
    return {"text": part} if isinstance(part, str) else {"input_ids": list(part)}


class ForkEvents:
    """An iterator over the events of a fork, and what they come to.

    `branches` and `join` grow with every event; `usage` and `taper` are there when the
    iterator has ended.
    """

    def __init__(
        self,
        received: AsyncIterator[dict[str, Any]],
        parts: Sequence[Mapping[str, Any]],
        abort: Callable[[str], Awaitable[None]],
        cancel: WhatToCancel | None,
    ) -> None:
        self.branches = [BranchProgress(i, part["rid"]) for i, part in enumerate(parts)]
        self.join: BranchProgress | None = None
        self.usage: dict[str, Any] = {}
        self.taper: dict[str, Any] = {}
        self._received, self._abort, self._cancel = received, abort, cancel
        self._cancelled: set[int] = set()

    async def __aiter__(self) -> AsyncIterator[ForkEvent]:
        async for event in self._received:
            if "usage" in event:
                self.usage, self.taper = event["usage"], event["taper"]
                continue
            yield self._note(event)
            if event["branch"] is not None:
                await self._cancel_unwanted()

    def _note(self, event: dict[str, Any]) -> ForkEvent:
        branch = self._progress(event)
        new = event["text"][len(branch.text) :]
        branch.text += new
        reason = branch.finish_reason = event["finish_reason"]
        meta = branch.meta_info = event.get("meta_info") or {}
        return ForkEvent(branch.branch, branch.rid, new, reason, meta)

    def _progress(self, event: dict[str, Any]) -> BranchProgress:
        if event["branch"] is not None:
            return self.branches[event["branch"]]
        if self.join is None:
            self.join = BranchProgress(None, event["rid"])
        return self.join

    async def _cancel_unwanted(self) -> None:
        if self._cancel is None:
            return
        for index in {*self._cancel(self.branches)} - self._cancelled:
            self._cancelled.add(index)
            if self.branches[index].finish_reason is None:
                await self._abort(self.branches[index].rid)
