"""A model of characters for the tests of front ends: token ids are code points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_taper.front_ends.run import ProgramRun
from sglang_taper.front_ends.types import FrontEnd, Part, Piece, Prompt

END = 3  # the id that ends a text, which has no character of its own here

# Cuts what a part says into chunks, and says which branch is heard next.
Chunks = Callable[[str], list[str]]
Next = Callable[[Sequence[int]], int]


def plain(pieces: Sequence[Piece]) -> str:
    """Pieces as text."""
    return "".join(p if isinstance(p, str) else "".join(map(chr, p)) for p in pieces)


def until_stop(
    text: str, stop: Sequence[str], bound: int | None
) -> tuple[str, list[int], dict[str, Any]]:
    """What an engine makes of a model that would say `text`: text, ids, reason."""
    ends = {text.find(s) + len(s): s for s in stop if s in text}
    end = min(ends, default=None)
    said = text if end is None else text[:end]
    if bound is not None and len(said) > bound:
        said, end = said[:bound], None
        return said, [*map(ord, said)], {"type": "length", "length": bound}
    ids = [*map(ord, said)]
    if end is None:
        return said, [*ids, END], {"type": "stop", "matched": END}
    return said, ids, {"type": "stop", "matched": ends[end]}


class Played:
    """One run to its end; `scripts` are what the parts would say, in their order."""

    def __init__(
        self,
        front_end: FrontEnd,
        prompt: str,
        scripts: Sequence[str],
        max_new_tokens: int | None = None,
        chunks: Chunks = lambda text: [text],
        choose: Next = lambda live: live[0],
    ) -> None:
        self.run = ProgramRun(
            "a", front_end, Prompt(prompt, tuple(map(ord, prompt))), max_new_tokens
        )
        self.stages: list[tuple[Part, ...]] = []
        self.texts: list[str] = []
        self._scripts = iter(scripts)
        self._chunks, self._choose = chunks, choose
        parts = self.run.start()
        while parts:
            self.stages.append(parts)
            parts = self._stage(parts)

    def _stage(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        events = [self._events(part) for part in parts]
        live = list(range(len(parts)))
        following: tuple[Part, ...] = ()
        while live:
            branch = self._choose(live)
            event = next(events[branch])
            if isinstance(event, dict):
                live.remove(branch)
                following = self.run.end(branch, event)
            else:
                self.run.hear(branch, *event)
            self.texts.append(self.run.text)
        return following

    def _events(self, part: Part) -> Iterator[Any]:
        script = next(self._scripts, "")
        bound = self.run.max_new_tokens_of(part)
        said, ids, reason = until_stop(script, part.stop, bound)
        for chunk in self._chunks(said):
            yield chunk, [*map(ord, chunk)]
        yield "", ids[len(said) :]
        yield reason
