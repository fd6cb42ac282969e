"""The runs of a comparison, in the order they are made.

Every round has its own requests, the same for all policies. Policies take turns, and
each round begins with another one, so that a machine that gets slower hits all alike.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec

from goodput_lib.execute import Execution
from goodput_lib.fitting import fitted
from goodput_lib.load import Job, Played, play
from goodput_lib.options import Options
from goodput_lib.policies import Contender
from goodput_lib.program_jobs import ProgramJobs
from goodput_lib.results import Run, achieved, result_of
from goodput_lib.servers import LiveServer
from sglang_taper.ids import new_group
from sglang_taper.workload.requests import PlannedRequest, WorkloadSpec, make_requests
from sglang_taper.workload.score import mean_time_between_tokens_ms

MEASURED = Contender("off", {"policy": "off"})
# A policy that attains less at one rate is not tried at a higher one.
HOPELESS = 0.5


class Yardstick(msgspec.Struct, frozen=True):
    """What `off` does in a closed loop: SLOs and rates are multiples of it."""

    off_ms: float | None = None
    off_requests_per_s: float | None = None


class Load(msgspec.Struct, frozen=True):
    """The jobs of a run; `requests`: their shapes, of programs only once they ran."""

    jobs: list[Job]
    requests: Callable[[], list[PlannedRequest]]
    share_clipped: float = 0.0
    share_dropped: float = 0.0


class Comparison:
    """All runs of one call. `run` yields results as they are ready."""

    def __init__(
        self,
        options: Options,
        servers: dict[bool, LiveServer],
        note: Callable[[str], None],
    ) -> None:
        self.options, self.servers, self.note = options, servers, note
        self.yardstick = Yardstick()
        self._began_s = time.monotonic()
        self._hopeless: set[tuple[int, str]] = set()
        self._attained: dict[tuple[int, str, int], list[tuple[float, float]]] = {}

    async def run(self) -> AsyncGenerator[dict[str, Any]]:
        measured = None
        if self.options.args.slo_procedure:
            measured = await self._measure()
        slos = self._slos()
        for round_, rate, contender in self._plan():
            if self._is_over() or (round_, contender.label) in self._hopeless:
                continue
            if measured and contender == MEASURED and round_ == 0 and rate is None:
                runs = [(slos, measured)]
            else:
                runs = [
                    (some, await self._run(contender, round_, rate, some[0]))
                    for some in (
                        [slos] if contender.is_slo_blind else [[s] for s in slos]
                    )
                ]
            for some, run in runs:
                for result in self._results(some, run, slos):
                    yield result

    def _results(
        self, some: list[dict[str, float]], run: Run, slos: list[dict[str, float]]
    ) -> Iterator[dict[str, Any]]:
        for slos_ms in some:
            result = result_of(run, slos_ms, self.options, self.yardstick)
            key = (run.round, run.contender.label, slos.index(slos_ms))
            if run.rate is not None:
                history = self._attained.setdefault(key, [])
                history.append((run.rate, result["slo_attainment"]))
                result["rate_at_attainment"] = achieved(
                    history, self.options.args.attainment
                )
                if result["slo_attainment"] < HOPELESS and slos_ms == slos[-1]:
                    self._hopeless.add((run.round, run.contender.label))
            yield result

    def _plan(self) -> Iterator[tuple[int, float | None, Contender]]:
        policies = self.options.policies
        for round_ in range(self.options.args.rounds):
            turn = round_ % len(policies)
            for rate in self._rates():
                for contender in policies[turn:] + policies[:turn]:
                    yield round_, rate, contender

    def _rates(self) -> list[float | None]:
        options = self.options
        capacity = self.yardstick.off_requests_per_s or 0.0
        rates = options.rates + [x * capacity for x in options.rate_factors]
        if rates:
            return list(rates)
        return [options.args.request_rate]

    def _slos(self) -> list[dict[str, float]]:
        given, off_ms = self.options.slos_ms, self.yardstick.off_ms
        if off_ms is None:
            return [given]
        return [{**given, "tpot": x * off_ms} for x in self.options.tpot_factors]

    def _is_over(self) -> bool:
        budget_s = self.options.args.time_budget_s
        return budget_s is not None and time.monotonic() - self._began_s > budget_s

    async def _measure(self) -> Run:
        """Run `off` in a closed loop and note what it needs and serves."""
        options = self.options
        spec = msgspec.structs.replace(
            options.spec(0), arrivals=options.measuring, rate_per_s=None
        )
        run = await self._play(MEASURED, 0, None, spec, options.slos_ms)
        everyone = (seen.outcome() for seen in run.played.seen)
        self.yardstick = Yardstick(
            mean_time_between_tokens_ms(everyone), _requests_per_s(run.played)
        )
        self.note(
            f"off: {self.yardstick.off_ms:.1f} ms between tokens, "
            f"{self.yardstick.off_requests_per_s:.2f} requests/s"
        )
        return run

    async def _run(
        self,
        contender: Contender,
        round_: int,
        rate: float | None,
        slos_ms: dict[str, float],
    ) -> Run:
        spec = self.options.spec(round_, rate)
        return await self._play(contender, round_, rate, spec, slos_ms)

    async def _play(
        self,
        contender: Contender,
        round_: int,
        rate: float | None,
        spec: WorkloadSpec,
        slos_ms: dict[str, float],
    ) -> Run:
        server = self.servers[contender.is_stock]
        planned = dict(slos_ms)
        if "tpot" in planned:
            planned["tpot"] *= self.options.args.planned_share
        await server.switch(contender, planned)
        load = self._load(server, spec)
        async with server.steps() as log:
            played = await play(load.jobs, spec.arrivals.concurrency)
        run = Run(
            id=new_group(),
            contender=contender,
            round=round_,
            rate=rate,
            spec=spec,
            requests=load.requests(),
            share_clipped=load.share_clipped,
            share_dropped=load.share_dropped,
            planned_slos_ms=planned,
            played=played,
            log=log,
            planner_p99_ms=server.planner_p99_ms,
            server=server.facts,
        )
        self.note(f"round {round_} {contender.label}{_of_rate(rate)}: {run.summary}")
        return run

    def _load(self, server: LiveServer, spec: WorkloadSpec) -> Load:
        """What a run sends: programs, or the requests of `spec`."""
        options = self.options
        if options.programs:
            timeout_s = options.args.request_timeout_s
            programs = ProgramJobs(server.url, options.programs, timeout_s)
            return Load(programs.jobs(spec), programs.requests)
        fitting = fitted(
            make_requests(spec),
            options.clip_prompt,
            min(options.max_request_tokens, server.max_total_tokens),
        )
        jobs = [
            self._job(server, request, f"{spec.seed} {number}")
            for number, request in enumerate(fitting.requests)
        ]
        shares = (fitting.share_clipped, fitting.share_dropped)
        return Load(jobs, lambda: fitting.requests, *shares)

    def _job(self, server: LiveServer, request: PlannedRequest, seed: str) -> Job:
        execution = Execution(
            server.target, request.shape, self.options.manner, f"tokens {seed}"
        )
        return Job(request.arrival_ms, execution.run)


def _of_rate(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:.2f}/s"


def _requests_per_s(played: Played) -> float:
    ended = [seen for seen in played.seen if seen.ended_ms is not None]
    return 1000 * len(ended) / (played.ended_ms - played.began_ms)
