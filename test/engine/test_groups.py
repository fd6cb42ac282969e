"""Which branch belongs to which request, and what it shares."""

from __future__ import annotations

from sglang_taper.engine.groups import Branch, GroupTable, arrives_aborted
from sglang_taper.policy.roster import DecodeRoster
from sglang_taper.policy.types import PolicyParams
from sglang_taper.protocol import BranchMeta

PARAMS = PolicyParams(ttft_slo_ms=500.0, tpot_slo_ms=40.0)


def attach(table: GroupTable, at_ms: float = 0.0, **meta: object) -> Branch:
    return table.attach("rid", BranchMeta(**meta), PARAMS, at_ms, 16)  # type: ignore[arg-type]


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


def test_a_fork_is_complete_when_every_sibling_has_come_and_ended() -> None:
    table = GroupTable(ttl_s=60)
    fork = {"group": "g", "width": 2, "depth": 1}
    one, two = attach(table, branch=0, **fork), attach(table, branch=1, **fork)
    assert one.fork is two.fork is not None
    table.end(one, 1)
    assert not one.fork.is_complete
    table.end(two, 2)
    assert one.fork.is_complete


def test_a_sibling_that_has_not_come_yet_keeps_its_fork_open() -> None:
    table = GroupTable(ttl_s=60)
    fork = {"group": "g", "width": 2, "depth": 1}
    first = attach(table, branch=0, **fork)
    table.end(first, 1)
    again = attach(table, branch=0, **fork)
    table.end(again, 2)
    assert first.fork is again.fork
    assert not again.fork.is_complete
    late = attach(table, branch=1, **fork)
    assert late.fork is first.fork


def test_stages_and_parents_tell_forks_apart() -> None:
    table = GroupTable(ttl_s=60)
    common = {"group": "g", "width": 2, "depth": 1}
    forks = {
        id(attach(table, **common, stage=stage, parent=parent).fork)
        for stage in (1, 2)
        for parent in (None, "a", "b")
    }
    assert len(forks) == 6


def test_serial_stages_and_commits_of_a_prefix_are_no_siblings() -> None:
    table = GroupTable(ttl_s=60)
    commit = table.attach("w", BranchMeta(group="g", width=4), PARAMS, 0.0, 0)
    assert commit.is_prefix_only
    assert commit.fork is None
    assert attach(table, group="g").fork is None


def test_a_group_remembers_descent_beyond_the_end_of_a_branch() -> None:
    table = GroupTable(ttl_s=60)
    for rid, parent in (("root", None), ("child", "root"), ("grandchild", "child")):
        meta = BranchMeta(group="g", parent=parent)
        table.end(table.attach(rid, meta, PARAMS, 0.0, 16), 1.0)
    assert table.groups["g"].parents == {
        "root": None,
        "child": "root",
        "grandchild": "child",
    }


def test_the_roster_tells_requests_when_they_leave_and_come_back() -> None:
    table = GroupTable(ttl_s=60)
    one, two = attach(table, group="g"), attach(table, group="g", branch=1)
    request = one.state.request
    request.record_tokens(10.0, 1)
    roster = DecodeRoster()
    assert roster.sync([one.state, two.state], 20.0)
    assert not roster.sync([one.state, two.state], 20.0)
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


def test_a_fork_is_decided_once_when_its_first_k_have_finished() -> None:
    table = GroupTable(ttl_s=60)
    fork = attach(table, group="g", width=3, depth=1, first_k=2).fork
    assert fork is not None
    assert [fork.finish_one() for _ in range(3)] == [False, True, False]
    assert fork.is_decided


def test_a_fork_without_first_k_is_never_decided() -> None:
    table = GroupTable(ttl_s=60)
    fork = attach(table, group="g", width=2, depth=1).fork
    assert fork is not None
    assert [fork.finish_one() for _ in range(2)] == [False, False]
    assert not fork.is_decided
