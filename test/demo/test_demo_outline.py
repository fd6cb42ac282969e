from __future__ import annotations

import pytest

from sglang_taper.demo.outline import (
    FALLBACK_POINTS,
    MAX_POINT_CHARS,
    MAX_POINTS,
    parse_points,
    points_or_fallback,
)


@pytest.mark.parametrize(
    "text",
    [
        "1. Hives\n2. Honey\n3. Neighbours",
        "1) Hives\n2) Honey\n3) Neighbours",
        "- Hives\n* Honey\n- Neighbours",
        "1.Hives\n\n  2.  Honey  \nand some prose\n3. Neighbours",
        "1. **Hives**: where to put them\n2. Honey: how much\n3. Neighbours: ask them",
    ],
)
def test_every_common_form_of_a_list_gives_its_points(text: str) -> None:
    assert parse_points(text) == ["Hives", "Honey", "Neighbours"]


def test_a_repeated_point_is_taken_once() -> None:
    assert parse_points("1. Hives\n2. Hives\n3. Honey") == ["Hives", "Honey"]


def test_a_line_without_words_is_no_point() -> None:
    assert parse_points("1.\n2. \n3. **\n4. Honey") == ["Honey"]


def test_a_long_list_is_cut_to_what_can_be_shown() -> None:
    outline = "\n".join(f"{i}. Point number {i}" for i in range(1, 20))
    points = parse_points(outline)
    assert points == [f"Point number {i}" for i in range(1, MAX_POINTS + 1)]


def test_a_long_point_is_cut_between_words() -> None:
    (point,) = parse_points("1. " + "honey " * 30)
    assert len(point) <= MAX_POINT_CHARS
    assert set(point.split()) == {"honey"}


def test_an_outline_with_three_points_is_the_models_own() -> None:
    assert points_or_fallback("1. a\n2. b\n3. c") == (["a", "b", "c"], True)


@pytest.mark.parametrize("text", ["", "Bees are nice.", "1. a\n2. b"])
def test_fewer_than_three_points_are_replaced_by_fixed_ones(text: str) -> None:
    assert points_or_fallback(text) == (list(FALLBACK_POINTS), False)
