"""What the C kernel is told to read: each slot of a row once, shared prefixes once for
all, and in pieces that keep all threads at work."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from decode_cases import group_layout, make_step

from sglang_taper.ops.native_plan import (
    MAX_ITEM_ROWS,
    SEES_ALL,
    NativePlan,
    make_extend_plan,
    make_plan,
)
from sglang_taper.ops.segments import Segment, StepLayout

Read = dict[int, Counter[int]]
LAYOUTS = [
    group_layout((8, 2049), (1, 0), (3, 5), private=17),
    group_layout((1, 3001), (2, 600), private=1025),
    group_layout((100, 300), private=3),
    StepLayout(
        (Segment((0, 1, 2), 0, 1111), Segment((2, 0), 1111, 1900)),
        (1905, 1111, 3000, 0),
    ),
]


def read_by_row(plan: NativePlan) -> Read:
    """How often each query reads which slot."""
    table, read = plan.table.flatten().numpy(), defaultdict(Counter)
    for begin, keys, first, num_rows, seen, _ in plan.items.tolist():
        for index, row in enumerate(plan.rows[first : first + num_rows].tolist()):
            visible = min(keys, max(0, seen + index))
            read[row].update(table[begin : begin + visible].tolist())
    return read


def results_of(plan: NativePlan) -> Counter[int]:
    """How many results of each query are final."""
    final: Counter[int] = Counter()
    for *_, first, num_rows, _, partial in plan.items.tolist():
        if partial < 0:
            final.update(plan.rows[first : first + num_rows].tolist())
    final.update(plan.merges[:, 0].tolist())
    return final


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_slot_of_a_row_is_read_exactly_once(
    layout: StepLayout, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    step = make_step(layout)
    plan = step.planned(make_plan)
    read = read_by_row(plan)
    for row, slots in enumerate(step.slots):
        assert read[row] == Counter(slots.tolist())
    assert results_of(plan) == Counter(range(len(step.slots)))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_new_tokens_read_what_is_before_them_and_themselves(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    cached, new = [0, 900, 5], [130, 70, 1]
    step = make_step(StepLayout((), tuple(map(sum, zip(cached, new, strict=True)))))
    plan = make_extend_plan(step.req_to_token, step.req_pool_indices, cached, new)
    read = read_by_row(plan)
    query = 0
    for slots, old in zip(step.slots, cached, strict=True):
        for position in range(old, len(slots)):
            assert read[query] == Counter(slots[: position + 1].tolist())
            query += 1
    assert results_of(plan) == Counter(range(query))


def test_every_partial_result_is_merged_once_into_its_own_row() -> None:
    step = make_step(LAYOUTS[3])
    plan = step.planned(make_plan)
    owner = {
        partial + index: row
        for *_, first, num_rows, _, partial in plan.items.tolist()
        for index, row in enumerate(plan.rows[first : first + num_rows].tolist())
        if partial >= 0
    }
    assert sorted(owner) == list(range(plan.num_partials))
    begin, merged = 0, []
    for row, end in plan.merges.tolist():
        for partial in plan.partials[begin:end].tolist():
            assert owner[partial] == row
            merged.append(partial)
        begin = end
    assert sorted(merged) == sorted(owner)


def test_a_shared_prefix_is_read_once_for_all_rows() -> None:
    plan = make_step(group_layout((8, 2048), private=16)).planned(make_plan)
    assert plan.items[:, 1].sum() == 2048 + 8 * 16
    assert plan.num_saved_tokens == 7 * 2048


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_no_thread_waits_long_for_the_last_item(
    layout: StepLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    items = make_step(layout).planned(make_plan).items
    work = items[:, 1] * (1 + items[:, 3])
    assert np.all(np.diff(work) <= 0)
    # no more than one item beyond its share is left to a thread
    assert work[0] <= work.sum() / 4 / 2


def test_many_rows_are_cut_into_equal_items() -> None:
    items = make_step(LAYOUTS[2]).planned(make_plan).items
    assert sorted(set(items[:, 3])) == [1, 50]
    assert MAX_ITEM_ROWS >= 50
    assert items[items[:, 3] == 50, 1].sum() == 2 * 300


def test_a_small_step_stays_on_the_calling_thread() -> None:
    small = make_step(group_layout((2, 60), private=1)).planned(make_plan)
    assert small.num_threads == 1
    assert np.all(small.items[:, 4] == SEES_ALL)


def test_a_row_with_one_result_needs_no_merge() -> None:
    plan = make_step(StepLayout((), (300, 4, 77))).planned(make_plan)
    assert len(plan.merges) == 0
    assert plan.num_partials == 0
