"""Who waits for whom before prefill, and who gives way when memory runs out.

Three pure decisions about forks: which siblings let another one compute what they
share, how much of the queue may be tried so that a fork is admitted whole, and in
which order rows are kept when the engine must retract some.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """A prompt and how much of it the radix tree holds.

    `tokens` is an `array('q')`; `node` names the tree node where the match of
    `num_matched` tokens ends, so equal nodes mean equal matched tokens. At most
    `limit` tokens may be matched: the last one has to be run for the first logits, and
    logprobs of the prompt need more. Prompts of different `namespace` (cache salt,
    LoRA adapter) share nothing.
    """

    tokens: Any
    node: Hashable
    num_matched: int
    limit: int
    namespace: Hashable = None

    @property
    def num_missing(self) -> int:
        """Tokens it could share that are not in the tree."""
        return self.limit - self.num_matched


class SharedWork:
    """What is being computed, or will be in this pass, by its first tokens.

    Two prompts that end at the same node and go on with the same page would compute
    the same KV. A prompt that lacks less than a page gains only by a copy of a partly
    filled page (`is_partial`), which needs a sibling that is still running then.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # By their next page; and all of them, by their next token.
        self._by_page: dict[Hashable, Prompt] = {}
        self._by_token: dict[Hashable, list[Prompt]] = {}

    def begin(self, prompt: Prompt) -> None:
        """`prompt` is computed now; those that share its next tokens may wait."""
        if len(prompt.tokens) - prompt.num_matched >= self._page_size:
            self._by_page.setdefault(_next(prompt, self._page_size), prompt)
        self._by_token.setdefault(_next(prompt, 1), []).append(prompt)

    def begun_by(self, prompt: Prompt) -> Prompt | None:
        """Who computes already what `prompt` would compute first, if anybody."""
        missing = prompt.num_missing
        if missing <= 0:
            return None
        if not self.is_partial(prompt):
            return self._by_page.get(_next(prompt, self._page_size))
        same_token = self._by_token.get(_next(prompt, 1), ())
        wanted = _next(prompt, missing)
        return next((p for p in same_token if _next(p, missing) == wanted), None)

    def is_partial(self, prompt: Prompt) -> bool:
        return prompt.num_missing < self._page_size


def _next(prompt: Prompt, length: int) -> Hashable:
    """Where the match of `prompt` ends and the `length` tokens that follow."""
    start = prompt.num_matched
    tokens = tuple(prompt.tokens[start : start + length])
    return (prompt.namespace, prompt.node, start, tokens)


class Unit(msgspec.Struct, frozen=True):
    """Waiting branches that are admitted together, or one request that stands alone.

    `num_tokens` is what all of them may still allocate, a shared prefix counted once;
    `total_tokens` includes what they share and is in the tree already.
    """

    num_rows: int
    num_tokens: int
    total_tokens: int


class Room(msgspec.Struct, frozen=True):
    """Tokens and rows that are free (or evictable) now, and those of the whole pool."""

    free_tokens: int
    free_rows: int
    pool_tokens: int
    pool_rows: int

    def could_hold(self, unit: Unit) -> bool:
        """Whether the unit fits when nothing else runs."""
        return unit.total_tokens < self.pool_tokens and unit.num_rows <= self.pool_rows


def num_units_to_try(units: Sequence[Unit], room: Room, busy: bool) -> int:
    """How many units, from the front of the queue, the engine may try to admit.

    A fork that does not fit waits whole, and so does what came after it: the room
    that running requests leave is kept for it. It is tried all the same when nothing
    runs (`busy` is False) or when it can never fit as a whole: then it goes in waves.
    Requests that stand alone are the engine's own to judge.
    """
    free_tokens, free_rows = room.free_tokens, room.free_rows
    for position, unit in enumerate(units):
        fits = unit.num_tokens < free_tokens and unit.num_rows <= free_rows
        may_wait = unit.num_rows > 1 and (busy or position > 0)
        if may_wait and not fits and room.could_hold(unit):
            return position
        free_tokens -= unit.num_tokens
        free_rows -= unit.num_rows
    return len(units)


def retraction_order(
    order: Sequence[int],
    requests: Sequence[Hashable],
    priorities: Sequence[Hashable],
) -> list[int]:
    """Rows from the one to keep longest to the one to retract first.

    `order` is SGLang's own; `requests` and `priorities` give the request and the
    priority of each row. Within a priority the best row of every request comes
    first, so a request loses its last running branch only when no other has several.
    """
    kept: list[int] = []
    for rows in _runs(order, priorities):
        firsts = {requests[row]: row for row in reversed(rows)}
        best = set(firsts.values())
        kept += [row for row in rows if row in best]
        kept += [row for row in rows if row not in best]
    return kept


def _runs(order: Sequence[int], priorities: Sequence[Hashable]) -> Iterator[list[int]]:
    run: list[int] = []
    for row in order:
        if run and priorities[row] != priorities[run[0]]:
            yield run
            run = []
        run.append(row)
    if run:
        yield run
