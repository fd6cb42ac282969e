"""Skeleton-of-Thought (arXiv 2307.15337): an outline, then all its points at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_taper.front_ends.types import Part, Program, Prompt

OUTLINE_LEAD = (
    "\n\nOutline of the answer, at least three points of a few words each:\n1."
)
MAX_POINTS = 10
MAX_OUTLINE_TOKENS = 192
# Of the request's tokens: the rest is for the answer, also if the outline is cut off.
MAX_OUTLINE_SHARE = 0.5
_POINT = re.compile(r"^[ \t]*\d+\.[ \t]*(\S.*?)[ \t]*$", re.M)
_WORDS = "[A-Za-z][^\\n]{2,48}"


def outline_grammar(low: int = 3, high: int = MAX_POINTS) -> str:
    """A regular expression for what follows "1.": `low` to `high` numbered lines."""
    needed = "".join(f"\\n{i}\\. {_WORDS}" for i in range(2, low + 1))
    more = ""
    for i in range(high, low, -1):
        more = f"(\\n{i}\\. {_WORDS}{more})?"
    return f" {_WORDS}{needed}{more}\\n\\n"


class SkeletonOfThought:
    """The outline is generated first and not shown; its points are the answer.

    A grammar keeps the outline a numbered list, so that small models make one too.
    Every part continues the same prompt, and all points the same outline. With fewer
    than two points the request is answered without an outline. A subclass may change
    the wording, the number of points, or set `outline_params` to `{}` and trust the
    model to write a list.
    """

    outline_lead = OUTLINE_LEAD
    max_points = MAX_POINTS
    outline_params: Mapping[str, Any] = {
        "regex": outline_grammar(),
        "max_new_tokens": MAX_OUTLINE_TOKENS,
    }

    def run(self, prompt: Prompt) -> Program:
        asked = (self.outline_lead,)
        (outline,) = yield [
            Part(
                asked,
                stop=("\n\n",),
                tail="\n\n",
                shown=False,
                max_share=MAX_OUTLINE_SHARE,
                sampling_params=self.outline_params,
            )
        ]
        points = parse_points("1." + outline.text)[: self.max_points]
        if len(points) < 2:
            yield [Part()]
            return
        context = (*asked, *outline.pieces)
        leads = [self.point_lead(i, point) for i, point in enumerate(points, 1)]
        yield [Part((*context, lead), ("\n",), lead=lead, tail="\n") for lead in leads]

    def point_lead(self, number: int, point: str) -> str:
        """What stands before the text of a point, in its prompt and in the answer."""
        return f"{number}. {point}:"


def parse_points(outline: str) -> list[str]:
    """The distinct points of a numbered list, in order."""
    return list(dict.fromkeys(_POINT.findall(outline)))
