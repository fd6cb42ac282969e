"""Requests in execution: which phase each of their paths is in.

A path runs its phases one after the other. A serial phase is one row of the decode
batch; a fork suspends the path until the paths it opened have ended, and its context
then holds their tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_taper.policy.state import BranchState, RequestState
from sglang_taper.workload.requests import PlannedRequest
from sglang_taper.workload.score import Outcome
from sglang_taper.workload.shape import Path


@dataclass(slots=True, eq=False)
class RunningPath:
    """One path of a request. `context_tokens`: prompt and all tokens it has seen."""

    request: RunningRequest
    phases: Path
    context_tokens: int
    parent: RunningPath | None = None
    index: int = 0
    shared_tokens: int = 0
    position: int = 0
    num_open: int = 0
    joined_tokens: int = 0
    first_branch_tokens: int = 0
    forked_ms: float = 0.0

    to_open: tuple[Path, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.position == len(self.phases)

    @property
    def next_is_serial(self) -> bool:
        return isinstance(self.phases[self.position], int)


@dataclass(slots=True, eq=False)
class Row:
    """A serial phase that decodes. `last_ms`: its last token, or when it began."""

    state: BranchState
    path: RunningPath
    base_tokens: int
    last_ms: float


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request from its arrival to its end; `rows` are in the order of creation."""

    planned: PlannedRequest
    state: RequestState
    arrival_ms: float
    num_branches: int = 0
    rows: list[Row] = field(default_factory=list)
    makespans_ms: list[float] = field(default_factory=list)
    max_itl_ms: float = 0.0
    is_victim: bool = False
    ended_ms: float | None = None

    @property
    def num_kv_tokens(self) -> int:
        """What it holds in the end, its prefix once."""
        return self.planned.shape.prompt_tokens + self.planned.shape.num_tokens

    def outcome(self) -> Outcome:
        shape = self.planned.shape
        return Outcome(
            sent_ms=self.arrival_ms,
            first_token_ms=self.state.first_token_ms,
            ended_ms=self.ended_ms,
            num_tokens=shape.num_tokens,
            num_critical_tokens=shape.num_critical_tokens,
            is_decomposable=shape.is_decomposable,
            is_victim=self.is_victim,
            makespans_ms=tuple(self.makespans_ms),
            max_itl_ms=self.max_itl_ms,
        )


@dataclass(slots=True, eq=False)
class News:
    """What a step has brought: requests that ended, and paths that must queue to go on,
    with the tokens to prefill and the rows they need."""

    ended: list[RunningRequest] = field(default_factory=list)
    waiting: list[tuple[RunningPath, int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ended or self.waiting)


class Progress:
    """Moves requests from phase to phase, and knows which ones changed.

    Paths that must queue are joins that compute anything, and where `forks_queue` all
    forks and joins. `dirty` is set when a row has come or gone.
    """

    def __init__(self, joins: str, forks_queue: bool) -> None:
        self.joins, self.forks_queue = joins, forks_queue
        self.dirty = True
        self._news = News()
        self.num_forks = 0
        self.last_join_ms = -1.0
        self.step = -1

    def take_news(self) -> News:
        """What has happened since this was last called."""
        news, self._news = self._news, News()
        return news

    def start(self, request: RunningRequest, now_ms: float) -> None:
        """Its prefill is done and has given its first token."""
        shape = request.planned.shape
        path = RunningPath(request, shape.phases, shape.prompt_tokens)
        request.state.record_tokens(now_ms)
        self.proceed(path, now_ms, has_token=True)

    def proceed(
        self, path: RunningPath, now_ms: float, has_token: bool = False
    ) -> None:
        """The next phase of `path`, or its end. `has_token`: prefill has given it the
        first token of the phase."""
        if path.has_ended:
            self._end(path, now_ms)
            return
        phase = path.phases[path.position]
        path.position += 1
        if isinstance(phase, tuple):
            self._fork(path, phase, now_ms)
            return
        request = path.request
        state = BranchState(
            request.state, request.num_branches, path.shared_tokens, phase
        )
        state.last_run_step = self.step
        request.num_branches += 1
        row = Row(state, path, path.context_tokens, now_ms)
        request.rows.append(row)
        self.dirty = True
        state.output_tokens = int(has_token)
        if state.output_tokens == phase:
            self.finish_row(row, now_ms)

    def finish_row(self, row: Row, now_ms: float) -> None:
        """A serial phase has all its tokens."""
        path = row.path
        row.state.end()
        path.request.rows.remove(row)
        path.context_tokens += row.state.output_tokens
        self.dirty = True
        self.proceed(path, now_ms)

    def _fork(
        self, path: RunningPath, branches: tuple[Path, ...], now_ms: float
    ) -> None:
        path.num_open, path.forked_ms = len(branches), now_ms
        path.joined_tokens = path.first_branch_tokens = 0
        path.to_open = branches
        self.num_forks += 1
        if self.forks_queue:
            self._news.waiting.append((path, 0, len(branches)))
        else:
            self.open_branches(path, now_ms)

    def open_branches(self, path: RunningPath, now_ms: float) -> None:
        """The branches of the fork that `path` is at have their places."""
        branches, path.to_open = path.to_open, ()
        context = path.context_tokens
        for index, phases in enumerate(branches):
            child = RunningPath(path.request, phases, context, path, index, context)
            self.proceed(child, now_ms)

    def _end(self, path: RunningPath, now_ms: float) -> None:
        parent = path.parent
        if parent is None:
            path.request.ended_ms = now_ms
            self._news.ended.append(path.request)
            return
        written = path.context_tokens - parent.context_tokens
        if path.index == 0:
            parent.first_branch_tokens = written
        parent.joined_tokens += written
        parent.num_open -= 1
        if parent.num_open == 0:
            self._join(parent, now_ms)

    def _join(self, path: RunningPath, now_ms: float) -> None:
        path.context_tokens += path.joined_tokens
        path.request.makespans_ms.append(now_ms - path.forked_ms)
        self.num_forks -= 1
        self.last_join_ms = now_ms
        tokens = self._tokens_to_prefill(path)
        if (tokens or self.forks_queue) and not path.has_ended:
            self._news.waiting.append((path, tokens, 1))
        else:
            self.proceed(path, now_ms)

    def _tokens_to_prefill(self, path: RunningPath) -> int:
        if self.joins == "kv":
            return 0
        known = path.first_branch_tokens if self.joins == "tree" else 0
        return path.joined_tokens - known

    def was_victim(self, request: RunningRequest) -> bool:
        """It did not fork, and while it ran another request did."""
        first_ms = request.state.first_token_ms or 0.0
        forked = self.num_forks > 0 or self.last_join_ms > first_ms
        return forked and not request.planned.shape.is_decomposable
