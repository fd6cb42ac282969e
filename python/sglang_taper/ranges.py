"""What a value from outside may be: ranges of numbers, and words beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """An open-ended numeric range, `low < x` or `low <= x`, and `x <= high`."""

    low: float
    high: float
    include_low: bool = False

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.include_low else value > self.low
        return above and value <= self.high

    def __str__(self) -> str:
        relation = "at least" if self.include_low else "above"
        return f"{relation} {self.low:g} and at most {self.high:g}"


@dataclass(frozen=True)
class WordsOrRange:
    """One of some words, or a number in a range."""

    words: tuple[str, ...]
    numbers: Range

    def __contains__(self, value: str | float) -> bool:
        if isinstance(value, str):
            return value in self.words
        return value in self.numbers

    def __str__(self) -> str:
        return f"{', '.join(self.words)}, or {self.numbers}"


def word_or_number(value: Any) -> str | float:
    """`value` as a float, or the word that it is. Raises TypeError for other types."""
    try:
        return float(value)
    except ValueError:
        return str(value)
