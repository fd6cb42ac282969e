"""What a branch shares, computes again, or finds evicted."""

from __future__ import annotations

from array import array

from sglang_taper.engine.groups import Branch, GroupTable
from sglang_taper.engine.sharing import (
    common_prefix,
    note_finish,
    note_prefill,
    num_distinct,
)
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta


def attach(table: GroupTable, branch: int = 0, width: int = 2) -> Branch:
    meta = BranchMeta(group="g", branch=branch, width=width, depth=1)
    return table.attach("rid", meta, PolicyParams(), 0.0, 16)


def ids(*values: int) -> array[int]:
    return array("q", values)


def test_a_sibling_shares_what_was_cached_and_counts_what_was_computed_again() -> None:
    table = GroupTable(ttl_s=60)
    one, two = attach(table), attach(table, 1)
    note_prefill(one, ids(1, 2, 3, 4, 5), 0, 1)
    note_prefill(two, ids(1, 2, 3, 4, 9), 3, 1)
    assert (one.num_shared, one.num_recomputed, one.num_prefilled) == (0, 0, 5)
    assert (two.num_shared, two.num_recomputed, two.num_prefilled) == (3, 1, 2)


def test_a_later_stage_may_share_what_was_generated() -> None:
    table = GroupTable(ttl_s=60)
    parent = attach(table, width=1)
    note_prefill(parent, ids(1, 2), 0, 1)
    note_finish(parent, ids(1, 2), ids(3, 4), 1)
    child = attach(table)
    note_prefill(child, ids(1, 2, 3, 4, 5), 3, 1)
    assert (child.num_shared, child.num_recomputed) == (3, 1)
    # The KV of the parent's last token was never computed, so it was not evicted.
    assert child.num_evicted == 0


def test_what_was_in_the_tree_and_is_not_any_more_was_evicted() -> None:
    table = GroupTable(ttl_s=60)
    note_prefill(attach(table), ids(1, 2, 3, 4, 5), 0, 1)
    child = attach(table, 1)
    note_prefill(child, ids(1, 2, 3, 4, 9), 1, 1)
    assert (child.num_shared, child.num_recomputed, child.num_evicted) == (1, 3, 3)


def test_the_rest_of_a_page_and_the_last_token_are_not_counted_as_evicted() -> None:
    table = GroupTable(ttl_s=60)
    prompt = ids(*range(40))
    note_prefill(attach(table), prompt, 0, 16)
    same = attach(table, 1)
    note_prefill(same, prompt, 32, 16)
    assert (same.num_recomputed, same.num_evicted) == (8, 0)


def test_an_aliased_row_computes_nothing() -> None:
    table = GroupTable(ttl_s=60)
    note_prefill(attach(table), ids(1, 2, 3), 0, 1)
    child = attach(table, 1)
    child.is_aliased = True
    note_prefill(child, ids(1, 2, 3), 2, 1)
    assert (child.num_shared, child.num_recomputed, child.num_prefilled) == (2, 0, 0)


def test_tokens_cached_by_strangers_are_not_shared_by_the_group() -> None:
    table = GroupTable(ttl_s=60)
    only = attach(table)
    note_prefill(only, ids(1, 2, 3), 2, 1)
    assert (only.num_shared, only.num_recomputed) == (0, 0)


def test_common_prefix_of_anything() -> None:
    assert common_prefix(ids(), ids(1)) == 0
    assert common_prefix(ids(1, 2), ids(1, 2)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 3)) == 2
    assert common_prefix(ids(5), ids(1)) == 0


def test_tokens_that_prompts_begin_with_count_once() -> None:
    prompts = [ids(1, 2, 3, 4), ids(1, 2, 9), ids(1, 2, 3, 5), ids(7)]
    # 1 2 3 4 / 5 / 9 / 7
    assert num_distinct(prompts) == 7
    assert num_distinct([ids(1, 2)] * 3) == 2
    assert num_distinct([]) == 0
