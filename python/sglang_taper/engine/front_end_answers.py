"""What a client of a front end sees: answers in SGLang's own form."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_taper.engine.clock import monotonic_ms
from sglang_taper.engine.token_memory import coder
from sglang_taper.front_ends.run import ProgramRun
from sglang_taper.front_ends.types import Piece
from sglang_taper.protocol import META_INFO_KEY

FRONT_END_KEY = "front_end"


class Chunk(NamedTuple):
    """What a branch has generated since its last chunk."""

    branch: int
    text: str
    ids: list[int]
    meta_info: dict[str, Any]


class Place(NamedTuple):
    """Which part of a program: stage from 0, branch of how many, its request id."""

    stage: int
    branch: int
    width: int
    rid: str


def encode(tokenizer: Any, pieces: tuple[Piece, ...]) -> list[int]:
    """Token ids of pieces one after another, without special tokens of our own."""
    _, encode_text = coder(tokenizer)
    ids: list[int] = []
    for piece in pieces:
        ids += encode_text(piece) if isinstance(piece, str) else piece
    return ids


class AnswerWriter:
    """The answers of one program, cumulative or incremental as the server streams."""

    def __init__(self, manager: Any, obj: GenerateReqInput, name: str) -> None:
        self._tokenizer, self._obj, self._name = manager.tokenizer, obj, name
        self._is_incremental = obj.stream and manager.incremental_streaming_output
        self._started_ms = monotonic_ms()
        self._ids: list[int] = []
        self._num_encoded = self._sent_text = self._sent_ids = 0
        self._last_info: dict[str, Any] = {}
        self._num_cached: int | None = None
        self._parts: list[dict[str, Any]] = []

    @property
    def num_ended(self) -> int:
        """Parts that have ended."""
        return len(self._parts)

    def note(self, info: dict[str, Any]) -> None:
        """Keep the facts of the newest chunk, and what the first found cached."""
        self._last_info = info
        if self._num_cached is None:
            self._num_cached = info.get("cached_tokens", 0)

    def note_end(self, place: Place, info: dict[str, Any]) -> None:
        """A part has ended with these facts."""
        self._parts.append(
            {
                **place._asdict(),
                "completion_tokens": info["completion_tokens"],
                "finish_reason": info["finish_reason"],
                META_INFO_KEY: info.get(META_INFO_KEY),
            }
        )

    def running(self, run: ProgramRun, place: Place, chunk: Chunk) -> dict[str, Any]:
        """The answer so far, and in `front_end` what has just come."""
        event = {
            "name": self._name,
            **place._asdict(),
            "text": chunk.text,
            "finish_reason": chunk.meta_info["finish_reason"],
        }
        return self._answer(run, None, event)

    def last(self, run: ProgramRun) -> dict[str, Any]:
        """The whole answer; `front_end` lists its parts in the order of their end."""
        facts = {
            "name": self._name,
            "num_stages": run.num_stages,
            "parts": self._parts,
        }
        answer = self._answer(run, run.finish_reason, facts)
        elapsed_ms = monotonic_ms() - self._started_ms
        answer["meta_info"]["e2e_latency"] = elapsed_ms / 1000
        return answer

    def _answer(
        self, run: ProgramRun, finish_reason: Any, facts: dict[str, Any]
    ) -> dict[str, Any]:
        pieces = run.pieces
        self._ids += encode(self._tokenizer, pieces[self._num_encoded :])
        self._num_encoded = len(pieces)
        text, ids = run.text, self._ids.copy()
        if self._is_incremental:
            text, ids = text[self._sent_text :], ids[self._sent_ids :]
            self._sent_text += len(text)
            self._sent_ids += len(ids)
        meta_info = {
            **self._last_info,
            "id": self._obj.rid,
            "finish_reason": finish_reason,
            "prompt_tokens": run.num_prompt_tokens,
            "completion_tokens": run.num_generated_tokens,
            "cached_tokens": self._num_cached,
            FRONT_END_KEY: facts,
        }
        return {"text": text, "output_ids": ids, "meta_info": meta_info}
