"""The course of a demo, from an idle machine to an idle machine."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

from rich.console import Console

from sglang_taper.demo.errors import DemoError
from sglang_taper.demo.options import DemoOptions
from sglang_taper.demo.play import play
from sglang_taper.errors import ServerProcessError
from sglang_taper.frontend.client import ServerError
from sglang_taper.server_process import ServerProcess

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How long the end of the server may lag behind the first broken request, and how
# long requests that are given up may take to say so to the server.
GRACE_S = 5.0


def run_demo(options: DemoOptions) -> int:
    """Play the demo; 0 when it came to its end, 1 when not, 128 + n after signal n.

    Prints to stdout and, on failure, one sentence to stderr. Whatever happens, no
    process that it started is left.
    """
    return asyncio.run(_guarded(options))


async def _guarded(options: DemoOptions) -> int:
    with _cancelled_by_signals() as received:
        try:
            await _play_on_server(options)
        except (DemoError, ServerError, ServerProcessError) as error:
            print(f"sglang-taper demo: error: {error}", file=sys.stderr)
            return 1
        except asyncio.CancelledError:
            if not received:
                raise
            print("sglang-taper demo: interrupted", file=sys.stderr)
            return 128 + received[0]
    return 0


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[list[int]]:
    """Signals cancel the current task, the first one only; gives those received."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []

    def cancel(number: int) -> None:
        if not received and task is not None:
            task.cancel()
        received.append(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, cancel, number)
    try:
        yield received
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _play_on_server(options: DemoOptions) -> None:
    console = Console()
    if options.url:
        await play(options, options.url.rstrip("/"), console)
        return
    console.print(f"Starting a server for {options.model_path}", highlight=False)
    server = ServerProcess(options.model_path, options.server_flags)
    finished = False
    try:
        await server.ready(lambda line: console.print(line, highlight=False))
        await _while_alive(server, play(options, server.url, console))
        finished = True
    finally:
        # Blocks the event loop, so that no signal interrupts it.
        server.stop(keep_log=not finished and not _is_cancelled())
    console.print("Server and all its processes have ended.")


def _is_cancelled() -> bool:
    return isinstance(sys.exc_info()[1], asyncio.CancelledError)


async def _while_alive(server: ServerProcess, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, but no longer than the server lives."""
    playing = asyncio.create_task(work)
    watching = asyncio.create_task(server.ended())
    try:
        await asyncio.wait({playing, watching}, return_when=asyncio.FIRST_COMPLETED)
        broken = playing.done() and playing.exception() is not None
        if broken and not watching.done():
            await asyncio.wait({watching}, timeout=GRACE_S)
        if watching.done():
            await watching
        await playing
    finally:
        for task in (playing, watching):
            task.cancel()
        await asyncio.wait({playing, watching}, timeout=GRACE_S)
