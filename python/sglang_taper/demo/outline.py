"""From the text of a numbered outline to the points to fork over."""

from __future__ import annotations

import re

MIN_POINTS, MAX_POINTS = 3, 6
MAX_POINT_CHARS = 60
FALLBACK_POINTS = (
    "What it is",
    "Why it matters",
    "How to begin",
    "What can go wrong",
)
_POINT = re.compile(r"^\s*(?:\d+[.)]|[-*])\s*(\S.*?)\s*$")


def parse_points(outline: str) -> list[str]:
    """The distinct points of a numbered or bulleted list, at most six, in order."""
    points: list[str] = []
    for line in outline.splitlines():
        match = _POINT.match(line)
        if match and (point := _short(match[1])) and point not in points:
            points.append(point)
    return points[:MAX_POINTS]


def points_or_fallback(outline: str) -> tuple[list[str], bool]:
    """The points to write about, and whether they are the model's own.

    A small model may write something else than a list; then the points are fixed.
    """
    points = parse_points(outline)
    if len(points) < MIN_POINTS:
        return list(FALLBACK_POINTS), False
    return points, True


def _short(point: str) -> str:
    """Without emphasis, and up to the first colon or 60 characters."""
    text = point.replace("*", "").partition(":")[0].strip()
    if len(text) <= MAX_POINT_CHARS:
        return text
    return text[:MAX_POINT_CHARS].rpartition(" ")[0] or text[:MAX_POINT_CHARS]
