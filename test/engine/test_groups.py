"""Which branch belongs to which request, and what it shares."""

from __future__ import annotations

from array import array

from sglang_taper.engine.groups import (
    Branch,
    GroupTable,
    arrives_aborted,
    common_prefix,
    note_finish,
    note_prefill,
)
from sglang_taper.engine.roster import DecodeRoster
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta

PARAMS = PolicyParams(ttft_slo_ms=500.0, tpot_slo_ms=40.0)


def attach(table: GroupTable, at_ms: float = 0.0, **meta: object) -> Branch:
    return table.attach("rid", BranchMeta(**meta), PARAMS, at_ms, 16)  # type: ignore[arg-type]


def ids(*values: int) -> array[int]:
    return array("q", values)


def test_siblings_share_one_request() -> None:
    table = GroupTable(ttl_s=60)
    one, two = attach(table, group="g", branch=0), attach(table, group="g", branch=1)
    assert one.state.request is two.state.request
    assert table.num_live_groups == 1


def test_a_request_without_a_group_stands_alone_with_its_own_slos() -> None:
    table = GroupTable(ttl_s=60)
    plain, own = attach(table), attach(table, tpot_slo_ms=7.0)
    assert plain.group is own.group is None
    assert plain.state.request.tpot_slo_ms == 40.0
    assert own.state.request.tpot_slo_ms == 7.0
    assert not table.groups


def test_a_later_stage_finds_its_request_until_the_ttl_has_passed() -> None:
    table = GroupTable(ttl_s=1)
    first = attach(table, at_ms=0, group="g")
    table.end(first, 100)
    assert attach(table, at_ms=900, group="g").state.request is first.state.request
    table.end(next(iter([first])), 900)
    table.settle(1000)
    other = attach(table, at_ms=2500, group="other")
    assert attach(table, at_ms=2500, group="g").state.request is not (
        first.state.request
    )
    assert other.group is not None


def test_ending_twice_counts_once() -> None:
    table = GroupTable(ttl_s=60)
    one, two = attach(table, group="g"), attach(table, group="g", branch=1)
    table.end(one, 1)
    table.end(one, 2)
    assert table.groups["g"].num_live == 1
    table.end(two, 3)
    assert table.num_live_groups == 0


def test_a_sibling_shares_what_was_cached_and_counts_what_was_computed_again() -> None:
    table = GroupTable(ttl_s=60)
    one = attach(table, group="g", width=2)
    two = attach(table, group="g", branch=1, width=2)
    note_prefill(one, ids(1, 2, 3, 4, 5), 0)
    note_prefill(two, ids(1, 2, 3, 4, 9), 3)
    assert (one.num_shared, one.num_recomputed) == (0, 0)
    assert (two.num_shared, two.num_recomputed) == (3, 1)


def test_a_later_stage_may_share_what_was_generated() -> None:
    table = GroupTable(ttl_s=60)
    parent = attach(table, group="g")
    note_prefill(parent, ids(1, 2), 0)
    note_finish(parent, ids(1, 2), ids(3, 4))
    child = attach(table, group="g", width=2, depth=1)
    note_prefill(child, ids(1, 2, 3, 4, 5), 3)
    assert (child.num_shared, child.num_recomputed) == (3, 1)


def test_tokens_cached_by_strangers_are_not_shared_by_the_group() -> None:
    table = GroupTable(ttl_s=60)
    only = attach(table, group="g")
    note_prefill(only, ids(1, 2, 3), 2)
    assert (only.num_shared, only.num_recomputed) == (0, 0)


def test_common_prefix_of_anything() -> None:
    assert common_prefix(ids(), ids(1)) == 0
    assert common_prefix(ids(1, 2), ids(1, 2)) == 2
    assert common_prefix(ids(1, 2), ids(1, 2, 3)) == 2
    assert common_prefix(ids(5), ids(1)) == 0


def test_the_roster_tells_requests_when_they_leave_and_come_back() -> None:
    table = GroupTable(ttl_s=60)
    one, two = attach(table, group="g"), attach(table, group="g", branch=1)
    request = one.state.request
    request.record_tokens(10.0, 1)
    roster = DecodeRoster()
    roster.sync([one.state, two.state], 20.0)
    roster.remove(one.state, 30.0)
    assert request.left_decode_ms is None
    roster.remove(two.state, 50.0)
    assert request.left_decode_ms == 50.0
    three = attach(table, group="g")
    roster.sync([three.state], 90.0)
    assert request.left_decode_ms is None
    assert request.schedule_origin_ms == 10.0 + 40.0


def test_samples_on_their_way_when_their_group_is_aborted_arrive_aborted() -> None:
    table = GroupTable(ttl_s=60)
    warm_up = table.attach("w", BranchMeta(group="g", width=2), PARAMS, 0.0, 0)
    table.end(warm_up, 5.0)
    table.abort("g", now_ms=10.0)
    table.abort("unknown", now_ms=10.0)
    sample = attach(table, at_ms=20.0, group="g", width=2)
    assert arrives_aborted(sample, called_ms=9.0)
    assert not arrives_aborted(sample, called_ms=11.0)
    assert not arrives_aborted(sample, called_ms=None)
    assert not arrives_aborted(attach(table, at_ms=20.0), called_ms=9.0)


def test_live_groups_are_counted_without_looking_at_all() -> None:
    table = GroupTable(ttl_s=60)
    branches = [attach(table, group=name) for name in "aab"]
    assert table.num_live_groups == 2
    table.end(branches[0], 1.0)
    assert table.num_live_groups == 2
    table.end(branches[1], 1.0)
    assert table.num_live_groups == 1
    table.settle(2.0)
    assert table.num_live_groups == 0
    attach(table, group="a")
    assert table.num_live_groups == 1
    table.clear()
    assert table.num_live_groups == 0
