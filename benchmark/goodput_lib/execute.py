"""A request of a workload, sent as a client program would: stage by stage.

Its prompt is random token ids. A serial phase is one stream; a fork is one stream for
each branch, all at once, with what was generated so far as prefix; after the join the
request goes on with the branches' tokens appended in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from goodput_lib.stream import RequestFailed, Row, Target, now_ms
from sglang_taper.demo.load import all_of
from sglang_taper.frontend.branch import Branch
from sglang_taper.protocol import BranchMeta
from sglang_taper.workload.score import Outcome
from sglang_taper.workload.shape import Path, RequestShape

# Ordinary words in every vocabulary of 40,000 tokens and more.
TOKEN_IDS = range(1000, 40_000)


@dataclass
class Seen:
    """What the client saw of one request. `closed_ms`: when it ended or was given up.

    `forks_ms`: begin and end of every fork. `gaps_ms`: between the tokens of every row,
    with the wait for the first one after a fork or a join.
    """

    is_decomposable: bool
    num_prompt_tokens: int
    sent_ms: float
    first_token_ms: float | None = None
    ended_ms: float | None = None
    closed_ms: float = 0.0
    num_tokens: int = 0
    num_critical_tokens: int = 0
    num_steps_run: int = 0
    num_steps_deferred: int = 0
    forks_ms: list[tuple[float, float]] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    error: str | None = None

    def add(self, row: Row) -> None:
        if self.first_token_ms is None:
            self.first_token_ms = row.times_ms[0]
            self.gaps_ms += row.gaps_ms(with_first=False)
        else:
            self.gaps_ms += row.gaps_ms(with_first=True)
        self.num_tokens += len(row.output_ids)
        self.num_steps_run += row.taper.get("steps_run", 0)
        self.num_steps_deferred += row.taper.get("steps_deferred", 0)

    def outcome(self, is_victim: bool = False) -> Outcome:
        return Outcome(
            sent_ms=self.sent_ms,
            first_token_ms=self.first_token_ms,
            ended_ms=self.ended_ms,
            num_tokens=self.num_tokens,
            num_critical_tokens=self.num_critical_tokens,
            is_decomposable=self.is_decomposable,
            is_victim=is_victim,
            makespans_ms=tuple(end - begin for begin, end in self.forks_ms),
            max_itl_ms=max(self.gaps_ms, default=0.0),
        )


@dataclass(frozen=True)
class Manner:
    """How requests are sent: tokens each branch brings along, and how they sample."""

    branch_own_tokens: int = 0
    temperature: float = 1.0


class Execution:
    """One request on its way; `run` does it all and never raises for a failure."""

    def __init__(
        self, target: Target, shape: RequestShape, manner: Manner, seed: str
    ) -> None:
        self.target, self.shape, self.manner = target, shape, manner
        self._numbers = random.Random(seed)
        self.seen = Seen(shape.is_decomposable, shape.prompt_tokens, now_ms())

    async def run(self) -> Seen:
        """Send it and wait; a failure or a time-out is in `error`."""
        seen = self.seen
        seen.sent_ms = now_ms()
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._whole()
            seen.ended_ms = now_ms()
        except TimeoutError:
            seen.error = f"not done after {self.target.timeout_s:g} s"
        except RequestFailed as error:
            seen.error = str(error)
        seen.closed_ms = seen.ended_ms or now_ms()
        return seen

    async def _whole(self) -> None:
        prompt = self._numbers.choices(TOKEN_IDS, k=self.shape.prompt_tokens)
        # A client that never forks has no group to tell of.
        root = Branch.root(BranchMeta()) if self.shape.is_decomposable else None
        _, self.seen.num_critical_tokens = await self._path(
            self.shape.phases, prompt, root
        )

    async def _path(
        self, phases: Path, ids: list[int], branch: Branch | None
    ) -> tuple[list[int], int]:
        """The ids after `phases`, and the tokens of the longest way through them."""
        critical = 0
        for phase in phases:
            if isinstance(phase, int):
                row = await self.target.generate(
                    ids,
                    phase,
                    branch.meta if branch else None,
                    self.manner.temperature,
                )
                self.seen.add(row)
                if branch:
                    branch.last_rid = row.rid
                ids = ids + row.output_ids
                critical += phase
            else:
                assert branch is not None
                ids, longest = await self._fork(phase, ids, branch)
                critical += longest
        return ids, critical

    async def _fork(
        self, paths: Sequence[Path], prefix: list[int], branch: Branch
    ) -> tuple[list[int], int]:
        began_ms = now_ms()
        starts = [
            prefix + self._numbers.choices(TOKEN_IDS, k=self.manner.branch_own_tokens)
            for _ in paths
        ]
        children = branch.fork(len(paths))
        ends = await all_of(
            *(
                self._path(path, start, child)
                for path, start, child in zip(paths, starts, children, strict=True)
            )
        )
        self.seen.forks_ms.append((began_ms, now_ms()))
        joined = [token for ids, _ in ends for token in ids[len(prefix) :]]
        return prefix + joined, max(critical for _, critical in ends)
