"""Skeleton-of-Thought: an outline that is not shown, then its points."""

from __future__ import annotations

import re

import pytest
from front_end_play import Played, plain

from sglang_taper.errors import FieldError
from sglang_taper.front_ends import registry
from sglang_taper.front_ends.skeleton import (
    OUTLINE_LEAD,
    SkeletonOfThought,
    outline_grammar,
    parse_points,
)

OUTLINE = " Flour\n2. Yeast\n3. Heat\n\n"


def play(*scripts: str) -> Played:
    return Played(SkeletonOfThought(), "How to bake?", scripts)


def test_the_points_of_the_outline_are_the_answer() -> None:
    played = play(OUTLINE, " Take rye.\n", " Fresh.", " Hot.\nVery.")
    assert [len(stage) for stage in played.stages] == [1, 3]
    assert played.run.text == "1. Flour: Take rye.\n2. Yeast: Fresh.\n3. Heat: Hot.\n"


def test_every_point_continues_the_same_outline() -> None:
    played = play(OUTLINE)
    context = OUTLINE_LEAD + OUTLINE
    points = ["1. Flour:", "2. Yeast:", "3. Heat:"]
    assert [plain(p.prompt) for p in played.stages[1]] == [context + p for p in points]


@pytest.mark.parametrize("outline", ["", " only one", " same\n2. same"])
def test_without_two_points_the_request_is_answered_as_it_is(outline: str) -> None:
    played = play(outline, "Mix.")
    (answer,) = played.stages[1]
    assert (answer.prompt, played.run.text) == ((), "Mix.")


def test_more_than_ten_points_are_cut() -> None:
    many = " p1" + "".join(f"\n{i}. p{i}" for i in range(2, 15))
    assert len(play(many).stages[1]) == 10


def test_points_of_a_list() -> None:
    assert parse_points("1. a\nno\n 2.  b c \n3.\n4. a") == ["a", "b c"]


@pytest.mark.parametrize(
    ("text", "is_outline"),
    [
        (" Flour one\n2. Yeast\n3. Heat\n\n", True),
        (" Flour one\n2. Yeast\n3. Heat\n4. Salt\n\n", True),
        (" Flour one\n2. Yeast\n\n", False),
        (" Flour one\n2. Yeast\n4. Heat\n\n", False),
        ("Flour", False),
    ],
)
def test_the_grammar_of_an_outline(text: str, is_outline: bool) -> None:
    assert bool(re.fullmatch(outline_grammar(), text)) is is_outline


def test_front_ends_are_made_by_name() -> None:
    assert registry.front_end_names() == ("skeleton-of-thought", "threadweaver")
    assert isinstance(registry.make_front_end("skeleton-of-thought"), SkeletonOfThought)
    with pytest.raises(FieldError, match="one of skeleton-of-thought, threadweaver"):
        registry.make_front_end("sprint")


@pytest.mark.parametrize("name", [["threadweaver"], {"a": 1}, 7, True])
def test_what_is_no_name_at_all_is_refused_like_an_unknown_one(name: object) -> None:
    with pytest.raises(FieldError, match="skeleton-of-thought, threadweaver"):
        registry.make_front_end(name)


@pytest.mark.parametrize("name", ["threadweaver", "Upper", "", "1st"])
def test_a_name_that_is_taken_or_not_allowed_is_refused(name: str) -> None:
    with pytest.raises(FieldError, match="front_end"):
        registry.register_front_end(name, SkeletonOfThought)
