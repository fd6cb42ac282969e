"""One request of a front end as a state machine: events in, actions out.

    run = ProgramRun("threadweaver", ThreadWeaver(), prompt, max_new_tokens=200)
    parts = run.start()                     # to generate at the same time
    run.hear(branch, text, ids)             # in any pieces, of any branch
    parts = run.end(branch, finish_reason)  # the next stage, () while others run
    run.finish_reason                       # set once the program has ended

Plain data only: whoever drives it does the generating.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_taper.errors import FrontEndError
from sglang_taper.front_ends.types import FrontEnd, Part, Piece, Prompt, Said
from sglang_taper.protocol import MAX_STAGE, MAX_WIDTH

FinishReason = Mapping[str, Any]
ABORTED = "abort"
OUT_OF_TOKENS = "length"


class _Heard:
    """What one part of the stage has generated so far."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.text = ""
        self.ids: list[int] = []
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def said(self) -> Said:
        # By the text: SGLang may miss a stop text that was written in short tokens.
        ends = (stop for stop in self.part.stop if self.text.endswith(stop))
        stopped_by = next(ends, None)
        tail = "" if stopped_by is not None else self.part.tail
        return Said(self.text, tuple(self.ids), stopped_by, tail)


class ProgramRun:
    """Runs the generator of a front end; knows the answer so far.

    `max_new_tokens` bounds the tokens along the longest path: those of the serial
    parts plus, at each fork, those of its longest branch. None: no bound.
    """

    def __init__(
        self, name: str, front_end: FrontEnd, prompt: Prompt, max_new_tokens: int | None
    ) -> None:
        self._name = name
        self.prompt = prompt
        self._program = front_end.run(prompt)
        self._max_new_tokens = max_new_tokens
        self._stage: list[_Heard] = []
        self._pieces: list[Piece] = []
        self._text = ""
        self._path_tokens = 0
        self.num_stages = 0
        self.num_generated_tokens = 0
        self.finish_reason: FinishReason | None = None

    def start(self) -> tuple[Part, ...]:
        """The parts of the first stage. Raises FrontEndError, as `end` does."""
        return self._advance(None)

    def hear(self, branch: int, text: str, ids: Sequence[int]) -> None:
        """A branch of the running stage has generated `text`, tokens `ids`."""
        heard = self._stage[branch]
        heard.text += text
        heard.ids += ids
        heard.num_tokens += len(ids)
        self.num_generated_tokens += len(ids)

    def end(
        self, branch: int, finish_reason: FinishReason, ending_text: str = ""
    ) -> tuple[Part, ...]:
        """A branch has ended; the parts of the next stage, or () if there are none.

        `finish_reason` is SGLang's: a `matched` number is the token that ended it,
        `ending_text` the text of that token or the text of the user that did. Both are
        taken off. Raises FrontEndError where the front end fails.
        """
        heard = self._stage[branch]
        heard.finish_reason = finish_reason
        if ending_text:
            heard.text = heard.text.removesuffix(ending_text)
        if isinstance(finish_reason.get("matched"), int) and heard.ids:
            heard.ids.pop()
        if any(other.finish_reason is None for other in self._stage):
            return ()
        return self._close_stage()

    def stop(self, finish_reason: FinishReason) -> None:
        """End the program from outside; what it has said so far is the answer."""
        self._text = self.text
        self._stage = []
        self._finish(finish_reason)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.ids)

    @property
    def text(self) -> str:
        """The answer so far, in order: of a fork up to its first unfinished branch."""
        return self._text + "".join(self._running_texts())

    def _running_texts(self) -> list[str]:
        texts = []
        for heard in self._stage:
            if heard.part.shown:
                done = heard.finish_reason is not None
                tail = heard.said().tail if done else ""
                texts.append(heard.part.lead + heard.text + tail)
            if heard.finish_reason is None:
                break
        return texts

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The answer of all stages that have ended, as text and token ids."""
        return tuple(self._pieces)

    def _close_stage(self) -> tuple[Part, ...]:
        stage, said = self._stage, [heard.said() for heard in self._stage]
        self._text = self.text
        for heard, answer in zip(stage, said, strict=True):
            if heard.part.shown:
                lead = (heard.part.lead,) if heard.part.lead else ()
                self._pieces += [*lead, *answer.pieces]
        self._path_tokens += max(heard.num_tokens for heard in stage)
        self._stage = []
        last = stage[-1].finish_reason
        if all(_ended_by(heard, ABORTED) for heard in stage):
            return self._finish(last)
        parts = self._advance(said)
        if not parts:
            return self._finish(last)
        if self._tokens_left() == 0:
            self._stage = []
            length = self._max_new_tokens
            return self._finish({"type": OUT_OF_TOKENS, "length": length})
        return parts

    def _finish(self, reason: FinishReason | None) -> tuple[Part, ...]:
        self._program.close()
        self.finish_reason = reason or {"type": "stop"}
        return ()

    def _tokens_left(self) -> int | None:
        if self._max_new_tokens is None:
            return None
        return max(0, self._max_new_tokens - self._path_tokens)

    def max_new_tokens_of(self, part: Part) -> int | None:
        """How many tokens a part of the running stage may generate."""
        own, left = part.sampling_params.get("max_new_tokens"), self._tokens_left()
        if left:
            left = max(1, int(part.max_share * left))
        bounds = [n for n in (own, left) if n is not None]
        return min(bounds) if bounds else None

    def _advance(self, said: list[Said] | None) -> tuple[Part, ...]:
        try:
            stage = next(self._program) if said is None else self._program.send(said)
        except StopIteration:
            if said is None:
                raise FrontEndError(self._name, "it generates nothing") from None
            return ()
        except Exception as error:
            raise FrontEndError(self._name, repr(error)) from error
        parts = self._checked(stage)
        self.num_stages += 1
        self._stage = [_Heard(part) for part in parts]
        return parts

    def _checked(self, stage: object) -> tuple[Part, ...]:
        parts = tuple(stage) if isinstance(stage, Sequence) else ()
        if not parts or not all(isinstance(part, Part) for part in parts):
            raise FrontEndError(self._name, "a stage must be a list of parts")
        if len(parts) > MAX_WIDTH:
            raise FrontEndError(self._name, f"{len(parts)} branches, max {MAX_WIDTH}")
        if self.num_stages >= MAX_STAGE:
            raise FrontEndError(self._name, f"more than {MAX_STAGE} stages")
        return parts


def _ended_by(heard: _Heard, kind: str) -> bool:
    return (heard.finish_reason or {}).get("type") == kind
