"""What a front end is given, what it asks for, and what it is told."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

# A text that the server tokenises by itself, or token ids as they are.
Piece = str | tuple[int, ...]


class Prompt(msgspec.Struct, frozen=True):
    """The request's prompt, as text and as the ids that it was tokenised to."""

    text: str
    ids: tuple[int, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """One generation: a serial part of the program, or one branch of a fork.

    It continues the request's prompt and then `prompt`. It ends like every request,
    and after one of the texts in `stop`, which stays in its text. `sampling_params`
    go over those of the request. `lead` is what the answer shows before its text.
    `tail` is put after its text, in the answer and in `Said.pieces`, unless a text in
    `stop` ended it. The answer holds nothing of a part that is not `shown`. It may use
    `max_share` of the tokens that the request has left, at least one.
    """

    prompt: tuple[Piece, ...] = ()
    stop: tuple[str, ...] = ()
    lead: str = ""
    tail: str = ""
    shown: bool = True
    max_share: float = 1.0
    sampling_params: Mapping[str, Any] = {}


class Said(msgspec.Struct, frozen=True):
    """What a part has generated.

    `ids` without the token that ended it, if one did. `stopped_by` is the text in
    `Part.stop` that it ends with. `tail` is that of the part, empty where not needed.
    """

    text: str
    ids: tuple[int, ...] = ()
    stopped_by: str | None = None
    tail: str = ""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What a later part puts into its prompt to continue this one."""
        return (self.ids, self.tail) if self.tail else (self.ids,)


Program = Generator[Sequence[Part], list[Said], None]


class FrontEnd(Protocol):
    """Turns one request into a program of parts.

    `run` yields the parts of a stage: one part is a serial stage, several are a fork,
    whose branches are generated at the same time. It is sent what they said, in the
    same order, when all have ended. The answer is what the shown parts said, in
    order. `run` must depend on what it is given alone: no clock, no randomness, no
    state between requests.
    """

    def run(self, prompt: Prompt) -> Program: ...
