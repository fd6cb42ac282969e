"""Programs as a workload: each runs in a thread of its own."""

from __future__ import annotations

import asyncio
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from goodput_lib.execute import Seen
from goodput_lib.load import Job
from goodput_lib.stream import now_ms
from sglang_taper.errors import FieldError
from sglang_taper.workload.requests import PlannedRequest, WorkloadSpec, make_requests

if TYPE_CHECKING:
    from programs import Work

    from goodput_lib.recording import RecordingEndpoint

MAX_THREADS = 512


class ProgramJobs:
    """Seeded programs for one run against one server."""

    def __init__(self, url: str, names: list[str], timeout_s: float) -> None:
        # SGLang's frontend takes seconds to import: only for those who want it.
        import programs

        from goodput_lib.recording import RecordingEndpoint

        unknown = set(names) - set(programs.PROGRAMS)
        if unknown:
            accepted = "among " + ", ".join(programs.PROGRAMS)
            raise FieldError("--programs", ",".join(sorted(unknown)), accepted)
        # The interpreter warns with a traceback and keeps the error; we report it.
        warnings.filterwarnings("ignore", message="Error in stream_executor")
        self._programs, self._names = programs, names
        self._endpoint, self._timeout_s = RecordingEndpoint(url), timeout_s
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="program")
        self._recordings: list[RecordingEndpoint] = []

    def jobs(self, spec: WorkloadSpec) -> list[Job]:
        """One job for each request of `spec`, whose arrivals it has."""
        rng = random.Random(f"programs {spec.seed}")
        tokens = spec.params.serial_tokens
        return [
            self._job(
                request.arrival_ms,
                self._programs.draw_work(self._names, rng, tokens),
            )
            for request in make_requests(spec)
        ]

    def _job(self, arrival_ms: float, work: Work) -> Job:
        async def send() -> Seen:
            recording = self._endpoint.recording()
            self._recordings.append(recording)
            error = await self._run(work, recording)
            seen = recording.finish()
            seen.closed_ms = now_ms()
            seen.error = error
            seen.ended_ms = seen.closed_ms if error is None else None
            return seen

        return Job(arrival_ms, send)

    async def _run(self, work: Work, recording: RecordingEndpoint) -> str | None:
        """What went wrong, if anything. A program that takes too long runs on."""
        recording.seen.sent_ms = now_ms()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(
            self._pool, self._programs.run_program, work, recording
        )
        try:
            await asyncio.wait_for(running, self._timeout_s)
        except TimeoutError:
            return f"not done after {self._timeout_s:g} s"
        except Exception as error:
            return repr(error)
        return None

    def requests(self) -> list[PlannedRequest]:
        """What the programs turned out to be, for the header of the result."""
        done = [one for one in self._recordings if one.seen.num_tokens]
        return [PlannedRequest(0.0, one.shape()) for one in done]
