"""The forking program: outline, one branch for each point, join, summary."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sglang as sgl
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

from sglang_taper.demo.errors import ProgramError
from sglang_taper.demo.outline import points_or_fallback
from sglang_taper.frontend.endpoint import RuntimeEndpoint

OUTLINE_TOKENS, POINT_TOKENS, SUMMARY_TOKENS = 48, 64, 40
# Plain text, so that every model can go on with it; the example keeps a small one on
# the subject, and sampling keeps it from repeating itself.
EXAMPLE = (
    "Topic: baking bread\nOutline:\n1. Choosing the flour\n2. Kneading the dough\n"
    "3. Letting it rise\n4. Baking the loaf\n\n"
)
SAMPLING = {"temperature": 0.6, "top_p": 0.9}


@dataclass(frozen=True)
class Progress:
    """What one stage or branch of the program has written since its last event.

    `branch` is None in the serial stages. `num_tokens` counts from the start of
    `part`, which is `outline`, `point` or `summary`.
    """

    part: str
    branch: int | None
    text: str
    num_tokens: int
    time_s: float
    meta_info: Mapping[str, Any]


@dataclass(frozen=True)
class Forked:
    """The program is about to fork over these points."""

    points: list[str]
    from_model: bool


Event = Progress | Forked
Report = Callable[[Event], None]


class ReportingEndpoint(RuntimeEndpoint):
    """Reports every chunk of every generation, by the executor that asked for it."""

    def __init__(self, url: str, api_key: str | None, report: Report) -> None:
        super().__init__(url, api_key)
        self._report = report
        self.parts: dict[StreamExecutor, tuple[str, int | None]] = {}

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        part, branch = self.parts[s]
        text = ""
        info: dict[str, Any] = {}
        for chunk, info in self.generate_stream(s, sampling_params):
            text += chunk
            tokens = info["completion_tokens"]
            now_s = time.perf_counter()
            self._report(Progress(part, branch, chunk, tokens, now_s, info))
        self._note_cached(s, generated=text)
        return text, info


@sgl.function
def article(s: Any, topic: str, endpoint: ReportingEndpoint, report: Report) -> None:
    """An article on `topic`: its points are written at the same time."""
    executor = s.stream_executor
    endpoint.parts[executor] = ("outline", None)
    s += f"{EXAMPLE}Topic: {topic}\nOutline:\n1."
    s += sgl.gen("outline", max_tokens=OUTLINE_TOKENS, stop="\n\n")
    points, from_model = points_or_fallback("1." + s["outline"])
    report(Forked(points, from_model))
    branches = s.fork(len(points))
    for index, (branch, point) in enumerate(zip(branches, points, strict=True)):
        endpoint.parts[branch.stream_executor] = ("point", index)
        branch += lead_in(point, topic)
        branch += sgl.gen("point", max_tokens=POINT_TOKENS, ignore_eos=True)
    branches.join()
    for point, text in zip(points, s["point"], strict=True):
        s += lead_in(point, topic) + text
    endpoint.parts[executor] = ("summary", None)
    s += "\n\nAll in all,"
    s += sgl.gen("summary", max_tokens=SUMMARY_TOKENS, ignore_eos=True)


def lead_in(point: str, topic: str) -> str:
    """How the part of the article about a point begins."""
    return f"\n\n{point}\n\nWhen it comes to {topic},"


async def run_article(
    url: str, api_key: str | None, topic: str, report: Report
) -> None:
    """Run the program beside the event loop, which `report` is called in.

    Raises ProgramError when a stage or branch of it fails. Cancelling stops waiting
    for it; its threads are daemons and end when the server does.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def post(callback: Callable[..., None], *args: Any) -> None:
        # Nobody listens any more once the demo has been interrupted.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, *args)

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(ProgramError(f"the forking program failed: {error!r}"))

    def work() -> None:
        post(settle, _run(url, api_key, topic, lambda event: post(report, event)))

    # The interpreter's own threads are daemons when this one is.
    threading.Thread(target=work, name="taper-demo-program", daemon=True).start()
    await done


def _run(url: str, api_key: str | None, topic: str, report: Report) -> Exception | None:
    # The interpreter warns with a traceback and keeps the error; we report the error.
    warnings.filterwarnings("ignore", message="Error in stream_executor")
    try:
        endpoint = ReportingEndpoint(url, api_key, report)
        state = article.run(
            topic=topic,
            endpoint=endpoint,
            report=report,
            backend=endpoint,
            **SAMPLING,
        )
        error: Exception | None = state.error()
    except Exception as caught:
        return caught
    return error
