"""Subtrees of the branches of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.policy.family import subtree

# root ─ a ─ a1 ─ a11
#      │   └ a2
#      └ b ─ b1
PARENTS = {
    "root": None,
    "a": "root",
    "b": "root",
    "a1": "a",
    "a2": "a",
    "a11": "a1",
    "b1": "b",
}


@pytest.mark.parametrize(
    ("root", "below"),
    [
        ("a", {"a1", "a2", "a11"}),
        ("root", {"a", "b", "a1", "a2", "a11", "b1"}),
        ("a11", set()),
        ("b", {"b1"}),
    ],
)
def test_a_branch_and_all_below_it_are_its_subtree(root: str, below: set[str]) -> None:
    assert subtree(root, PARENTS) == {root} | below


def test_an_unknown_root_is_its_own_subtree() -> None:
    assert subtree("nobody", PARENTS) == {"nobody"}


def test_children_are_found_when_their_parent_is_not_listed() -> None:
    assert subtree("gone", {"x": "gone", "y": "x", "z": None}) == {"gone", "x", "y"}


def test_an_id_that_begins_like_the_root_is_another_branch() -> None:
    assert subtree("a", {"a": None, "ab": None, "abc": "ab"}) == {"a"}


@pytest.mark.parametrize(
    ("parents", "found"),
    [
        ({"a": "a"}, {"a"}),
        ({"a": "b", "b": "a"}, {"a", "b"}),
        ({"a": "c", "b": "a", "c": "b", "d": "c"}, {"a", "b", "c", "d"}),
    ],
)
def test_a_cycle_ends(parents: dict[str, str], found: set[str]) -> None:
    assert subtree("a", parents) == found


def test_a_chain_may_be_long() -> None:
    parents = {str(i): str(i - 1) for i in range(1, 5000)}
    assert len(subtree("0", parents)) == 5000


@given(
    st.dictionaries(st.integers(0, 30), st.none() | st.integers(0, 30)).map(
        lambda p: {str(k): None if v is None else str(v) for k, v in p.items()}
    )
)
def test_whoever_reaches_the_root_upwards_is_in_it_and_nobody_else(
    parents: dict[str, str | None],
) -> None:
    def reaches(rid: str | None) -> bool:
        seen: set[str | None] = set()
        while rid is not None and rid not in seen:
            if rid == "0":
                return True
            seen.add(rid)
            rid = parents.get(rid)
        return False

    assert subtree("0", parents) == {"0"} | {r for r in parents if reaches(r)}
