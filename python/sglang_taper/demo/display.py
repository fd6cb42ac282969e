"""Branches side by side while they are written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

LINE_CHARS = 72
REFRESH_S = 0.1
PANEL_LINES = 7


Kind = Literal["stage", "branch", "serial"]


@dataclass
class Lane:
    """One text that grows: a stage or branch of the program, or a serial request."""

    title: str
    kind: Kind
    text: str = ""
    num_tokens: int = 0
    finished: bool = False


class Board(Protocol):
    """Where the lanes are shown."""

    def open(self, key: str, title: str, kind: Kind) -> None:
        """A new lane, in the place of an older one with this key."""

    def write(self, key: str, text: str, num_tokens: int, finished: bool) -> None:
        """More text of a lane, which now has `num_tokens`."""


class PlainBoard:
    """Whole lines, each with its lane's name: for files and pipes.

    Of serial requests only begin and end are told, which would drown the branches.
    """

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print = print_line
        self._lanes: dict[str, Lane] = {}

    def open(self, key: str, title: str, kind: Kind) -> None:
        self._lanes[key] = Lane(title, kind)
        self._print(f"[{key}] {title}")

    def write(self, key: str, text: str, num_tokens: int, finished: bool) -> None:
        lane = self._lanes[key]
        if lane.kind != "serial":
            lane.text += text
        while line := _cut_line(lane.text):
            self._show(key, line)
            lane.text = lane.text[len(line) :]
        if finished:
            self._show(key, lane.text)
            self._print(f"[{key}] ({num_tokens} tokens)")
            lane.text = ""

    def _show(self, key: str, line: str) -> None:
        if line.strip():
            self._print(f"[{key}]   {line.strip()}")


def _cut_line(text: str) -> str:
    """The first line of `text` that is complete, or long enough; else nothing."""
    head, newline, _ = text.partition("\n")
    if newline:
        return head + newline
    if len(text) < LINE_CHARS:
        return ""
    return text[: text.rfind(" ", 1, LINE_CHARS) + 1] or text[:LINE_CHARS]


class LiveBoard:
    """Panels in the terminal; the branches of a fork stand beside each other."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console, self._live = console, live
        self._lanes: dict[str, Lane] = {}
        self._drawn_s = 0.0

    def open(self, key: str, title: str, kind: Kind) -> None:
        self._lanes[key] = Lane(title, kind)

    def write(self, key: str, text: str, num_tokens: int, finished: bool) -> None:
        lane = self._lanes[key]
        lane.text += text
        lane.num_tokens, lane.finished = num_tokens, finished
        now_s = time.monotonic()
        if now_s - self._drawn_s >= REFRESH_S:
            self._drawn_s = now_s
            self.draw()

    def draw(self) -> None:
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        branches = [lane for lane in self._lanes.values() if lane.kind == "branch"]
        others = [lane for lane in self._lanes.values() if lane.kind != "branch"]
        width = max(24, self._console.width // max(1, min(3, len(branches))) - 1)
        panels = Columns([_panel(lane, width) for lane in branches])
        return Group(*(_one_line(lane, self._console.width) for lane in others), panels)


def _panel(lane: Lane, width: int) -> Panel:
    style = "green" if lane.finished else "cyan"
    # One line less than there is room for: words that wrap leave gaps.
    shown = _tail(lane.text.strip(), (PANEL_LINES - 1) * (width - 4))
    title = f"{lane.num_tokens}: {lane.title}"
    return Panel(
        Text(shown),
        title=Text(title),
        width=width,
        height=PANEL_LINES + 2,
        border_style=style,
    )


def _one_line(lane: Lane, width: int) -> Text:
    head = f"{lane.title} ({lane.num_tokens}): "
    room = max(0, width - len(head) - 1)
    text = _tail(" ".join(lane.text.split()), room)
    return Text(head, style="bold") + Text(text, style="dim")


def _tail(text: str, num_chars: int) -> str:
    """At most the last `num_chars` of `text`, from the beginning of a word on."""
    if len(text) <= num_chars:
        return text
    return text[len(text) - num_chars :].partition(" ")[2]


@contextlib.contextmanager
def board_for(console: Console) -> Iterator[Board]:
    """A live board on a terminal, plain lines anywhere else."""
    if not console.is_terminal:
        yield PlainBoard(lambda line: print(line, file=console.file, flush=True))
        return
    with Live(console=console, auto_refresh=False) as live:
        board = LiveBoard(console, live)
        yield board
        board.draw()
