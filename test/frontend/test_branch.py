"""The metadata of a program's states, without any server."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.errors import FieldError
from sglang_taper.frontend.branch import Branch, with_branch
from sglang_taper.ids import new_rid
from sglang_taper.protocol import MAX_DEPTH, MAX_WIDTH, BranchMeta, parse_branch_meta

fork_plans = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=12)


@given(fork_plans)
def test_any_tree_of_forks_gives_metadata_that_the_server_accepts(plan):
    states = [Branch.root(BranchMeta(tpot_slo_ms=50.0))]
    for which, width in plan:
        states += states[which % len(states)].fork(width)
    for state in states:
        assert parse_branch_meta(state.meta.to_wire()) == state.meta
        assert state.meta.tpot_slo_ms == 50.0


@given(fork_plans)
def test_every_state_of_a_program_has_its_own_place_in_one_group(plan):
    states = [Branch.root(BranchMeta())]
    for which, width in plan:
        states += states[which % len(states)].fork(width)
    places = {(s.meta.depth, s.meta.stage, s.meta.branch) for s in states}
    assert len(places) == len(states)
    assert len({s.meta.group for s in states}) == 1


def test_two_programs_have_different_groups():
    assert Branch.root(BranchMeta()).meta.group != Branch.root(BranchMeta()).meta.group


def test_a_fork_wider_than_the_server_accepts_is_refused_by_name():
    with pytest.raises(FieldError, match=rf"fork\.width={MAX_WIDTH + 1}"):
        Branch.root(BranchMeta()).fork(MAX_WIDTH + 1)


def test_forks_nested_deeper_than_the_server_accepts_are_refused_by_name():
    state = Branch.root(BranchMeta())
    for _ in range(MAX_DEPTH):
        (state,) = state.fork(1)
    with pytest.raises(FieldError, match=rf"fork\.depth={MAX_DEPTH + 1}"):
        state.fork(1)


def test_no_request_id_is_a_prefix_of_another():
    rids = sorted(new_rid() for _ in range(500))
    assert not any(b.startswith(a) for a, b in itertools.pairwise(rids))


def test_other_custom_params_survive_and_the_callers_dicts_are_not_written_to():
    given_params = {"temperature": 0, "custom_params": {"mine": 1}}
    params = with_branch(given_params, BranchMeta(group="g"))
    assert params["custom_params"] == {"mine": 1, "taper": {"group": "g"}}
    assert given_params == {"temperature": 0, "custom_params": {"mine": 1}}
