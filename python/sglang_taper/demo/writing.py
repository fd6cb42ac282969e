"""Part one: the forking program beside serial requests, shown while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sglang_taper.demo.display import Board
from sglang_taper.demo.load import (
    SerialRequest,
    all_of,
    branch_steps,
    send_serial,
)
from sglang_taper.demo.program import Event, Forked, Progress, run_article
from sglang_taper.demo.score import (
    RequestRecord,
    Slo,
    describe,
    describe_slo,
    score,
)
from sglang_taper.demo.steps import binned, forked_widths, step_facts, step_log
from sglang_taper.frontend.client import StreamEvent, TaperClient

SERIAL_TOKENS = 80
SERIAL_PROMPTS = (
    "The sky is blue because",
    "A bicycle stays upright because",
    "An old clock told the children that",
)


class ArticleView:
    """Follows the program: what it wrote, when, and what the server said about it."""

    def __init__(self, board: Board, note: Callable[[str], None]) -> None:
        self._board, self._note = board, note
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._began_s
        self._tokens: dict[str, int] = {}
        self._infos: list[Any] = []
        self.points: Forked | None = None

    def report(self, event: Event) -> None:
        """An event of the program."""
        if isinstance(event, Forked):
            self._forked(event)
        else:
            self._progress(event)

    def _forked(self, event: Forked) -> None:
        self.points = event
        if not event.from_model:
            self._note("The outline has fewer than 3 points: going on with fixed ones.")
        for index, point in enumerate(event.points):
            self._board.open(f"branch {index + 1}", point, "branch")

    def _progress(self, event: Progress) -> None:
        key = event.part if event.branch is None else f"branch {event.branch + 1}"
        if event.branch is None and key not in self._tokens:
            self._board.open(key, f"the program's {event.part}", "stage")
        self._last_s = event.time_s
        if self._first_s is None:
            self._first_s = event.time_s
        self._tokens[key] = event.num_tokens
        finished = event.meta_info.get("finish_reason") is not None
        if finished and event.branch is not None:
            self._infos.append(event.meta_info)
        self._board.write(key, event.text, event.num_tokens, finished)

    def record(self) -> RequestRecord:
        """The program as one request."""
        branches = [n for key, n in self._tokens.items() if key.startswith("branch")]
        num_tokens = sum(self._tokens.values())
        return RequestRecord(
            name="program",
            is_forked=True,
            sent_s=self._began_s,
            first_token_s=self._last_s if self._first_s is None else self._first_s,
            last_token_s=self._last_s,
            num_tokens=num_tokens,
            num_critical_tokens=num_tokens - sum(branches) + max(branches, default=0),
            branches=tuple(branch_steps(self._infos)),
        )


async def write_article(
    client: TaperClient,
    *,
    url: str,
    api_key: str | None,
    topic: str,
    slo: Slo,
    board: Board,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Run the program and, beside it, serial requests until it ends; the facts.

    Raises ProgramError or ServerError when the server does not do its part.
    """
    view = ArticleView(board, note)
    running = asyncio.Event()
    running.set()

    async def write() -> None:
        try:
            await run_article(url, api_key, topic, view.report)
        finally:
            running.clear()

    async with step_log(client) as log:
        beside = [
            _ask_while(running, client, board, i) for i in range(len(SERIAL_PROMPTS))
        ]
        _, *asked = await all_of(write(), *beside)
    serial = [record for records in asked for record in records]
    facts = _facts(view, serial, slo)
    forked = [s for s in log.steps if s["num_rows"] > s["num_requests"]]
    facts["width_over_time"] = binned(forked_widths(forked))
    return {"policy": "taper", **facts, **step_facts([log])}


async def _ask_while(
    running: asyncio.Event, client: TaperClient, board: Board, index: int
) -> list[RequestRecord]:
    key = f"serial {index + 1}"
    records: list[RequestRecord] = []

    def show(event: StreamEvent) -> None:
        tokens = event.meta_info["completion_tokens"]
        board.write(key, event.text, tokens, event.finished)

    while running.is_set():
        board.open(key, SERIAL_PROMPTS[index], "serial")
        request = SerialRequest(SERIAL_PROMPTS[index], SERIAL_TOKENS)
        name = f"{key}.{len(records) + 1}"
        records.append(await send_serial(client, request, name, show))
    return records


def _facts(view: ArticleView, serial: list[RequestRecord], slo: Slo) -> dict[str, Any]:
    program = view.record()
    duration_s = program.last_token_s - program.sent_s
    scored = score([program, *serial], slo, duration_s)
    beside = score(serial, slo, duration_s)
    points = view.points
    return {
        "points": points.points if points else [],
        "points_from_model": bool(points and points.from_model),
        "slo": describe_slo(slo),
        "duration_s": duration_s,
        "mean_width": scored["mean_width"],
        "num_serial": scored["num_serial"],
        "num_serial_good": scored["num_serial_good"],
        "slo_attainment": scored["slo_attainment"],
        "program_ttft_ms": program.ttft_ms,
        "program_tpot": program.tpot_ms,
        "program_tpot_critical": program.tpot_critical_ms,
        "serial_ttft_ms": beside["ttft_ms"],
        "serial_tpot_ms": beside["serial_tpot_ms"],
        "requests": [describe(record, slo) for record in [program, *serial]],
    }
