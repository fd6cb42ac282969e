"""What a `sglang.lang` program did: its shape, and when its tokens came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

from goodput_lib.execute import Seen
from goodput_lib.stream import now_ms
from sglang_taper.frontend.branch import Branch
from sglang_taper.frontend.endpoint import RuntimeEndpoint
from sglang_taper.protocol import META_INFO_KEY
from sglang_taper.workload.shape import (
    Path,
    RequestShape,
    count_critical_tokens,
    make_shape,
)


@dataclass
class _Node:
    """A branch of the program: numbers of tokens and forks, in order."""

    parts: list[int | tuple[float, list[_Node]]] = field(default_factory=list)
    last_ms: float = 0.0

    def path(self) -> Path:
        return tuple(
            part if isinstance(part, int) else _branches(part[1])
            for part in self.parts
            if isinstance(part, int) or _branches(part[1])
        )

    def end_ms(self) -> float:
        ends = [node.end_ms() for _, nodes in self.forks() for node in nodes]
        return max([self.last_ms, *ends])

    def forks(self) -> Iterator[tuple[float, list[_Node]]]:
        yield from (part for part in self.parts if not isinstance(part, int))

    def intervals_ms(self) -> Iterator[tuple[float, float]]:
        for began_ms, nodes in self.forks():
            yield began_ms, max(node.end_ms() for node in nodes)
            for node in nodes:
                yield from node.intervals_ms()


def _branches(nodes: list[_Node]) -> tuple[Path, ...]:
    return tuple(path for path in (node.path() for node in nodes) if path)


class RecordingEndpoint(RuntimeEndpoint):
    """A backend that notes every token and every fork; `recording` for each program."""

    seen: Seen
    _lock: threading.Lock
    _root: _Node | None
    _nodes: dict[int, tuple[Branch, _Node]]

    def recording(self) -> RecordingEndpoint:
        """The same server, nothing recorded yet."""
        other = self.with_slo()
        assert isinstance(other, RecordingEndpoint)
        other._lock, other._root, other._nodes = threading.Lock(), None, {}
        other.seen = Seen(False, 0, now_ms())
        return other

    def shape(self) -> RequestShape:
        """What the program turned out to be."""
        assert self._root is not None, "the program has asked for nothing yet"
        return make_shape(max(1, self.seen.num_prompt_tokens), self._root.path())

    def finish(self) -> Seen:
        """The program has ended, well or not: the record of it."""
        seen = self.seen
        if self._root is not None:
            path = self._root.path()
            seen.is_decomposable = any(isinstance(part, tuple) for part in path)
            seen.num_critical_tokens = count_critical_tokens(path)
            seen.forks_ms = list(self._root.intervals_ms())
        return seen

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        sent_ms, text = now_ms(), ""
        times_ms: list[float] = []
        info: dict[str, Any] = {}
        num_tokens = 0
        for chunk, info in self.generate_stream(s, sampling_params):
            text += chunk
            if info["completion_tokens"] > num_tokens:
                num_tokens = info["completion_tokens"]
                times_ms.append(now_ms())
        self._note_cached(s, generated=text)
        if times_ms:
            self._note(self._branch_of(s), sent_ms, times_ms, num_tokens, info)
        return text, info

    def fork(self, s: StreamExecutor, size: int) -> list[Branch]:
        began_ms = now_ms()
        branches = super().fork(s, size)
        with self._lock:
            parent = self._node_of(self._branch_of(s))
            nodes = [self._node_of(branch) for branch in branches]
            parent.parts.append((began_ms, nodes))
        return branches

    def _node_of(self, branch: Branch) -> _Node:
        # Branches are kept beside their nodes: an id is reused once its object is gone.
        if id(branch) not in self._nodes:
            self._nodes[id(branch)] = (branch, _Node())
            if self._root is None:
                self._root = self._nodes[id(branch)][1]
        return self._nodes[id(branch)][1]

    def _note(
        self,
        branch: Branch,
        sent_ms: float,
        times_ms: list[float],
        num_tokens: int,
        info: dict[str, Any],
    ) -> None:
        taper = info.get(META_INFO_KEY) or {}
        with self._lock:
            node, seen = self._node_of(branch), self.seen
            node.parts.append(num_tokens)
            node.last_ms = times_ms[-1]
            if seen.first_token_ms is None:
                seen.first_token_ms = times_ms[0]
                seen.num_prompt_tokens = info["prompt_tokens"]
            else:
                times_ms = [sent_ms, *times_ms]
            seen.gaps_ms += [later - earlier for earlier, later in pairwise(times_ms)]
            seen.num_tokens += num_tokens
            seen.num_steps_run += taper.get("steps_run", 0)
            seen.num_steps_deferred += taper.get("steps_deferred", 0)
