"""What a plan reads: each slot of a row once, shared prefixes once for all."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from decode_cases import Step, group_layout, make_step

from sglang_taper.ops.segments import Segment, StepLayout
from sglang_taper.ops.torch_decode import make_plan
from sglang_taper.ops.torch_plan import CALL_TOKENS, Part, TorchPlan, buckets


def slots_of(part: Part) -> list[int]:
    if isinstance(part.keys, slice):
        return list(range(part.keys.start, part.keys.stop))
    return part.keys.tolist()


def read_by_row(plan: TorchPlan) -> list[Counter[int]]:
    read: list[Counter[int]] = [Counter() for _ in range(plan.num_rows)]
    for part in plan.parts:
        if part.bias is None:
            for row in part.rows.tolist():
                read[row].update(slots_of(part))
        else:
            pieces = torch.tensor(slots_of(part)).view(len(part.rows), -1)
            seen = part.bias.view(len(part.rows), -1) == 0
            for row, own, mask in zip(part.rows.tolist(), pieces, seen, strict=True):
                read[row].update(own[mask].tolist())
    return read


def num_read(plan: TorchPlan) -> int:
    return sum(len(slots_of(part)) for part in plan.parts)


def planned(step: Step) -> TorchPlan:
    return step.planned(make_plan)


@pytest.mark.parametrize("permuted", [False, True], ids=["consecutive", "permuted"])
@pytest.mark.parametrize(
    "layout",
    [
        group_layout((8, 2049), (1, 0), (3, 5), private=17),
        group_layout((1, 3001), (2, 600), private=1025),
        StepLayout(
            (Segment((0, 1, 2), 0, 1111), Segment((2, 0), 1111, 1900)),
            (1905, 1111, 3000, 0),
        ),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_slot_of_a_row_is_read_exactly_once(
    layout: StepLayout,
    permuted: bool,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    step = make_step(layout, permuted=permuted)
    for read, slots in zip(read_by_row(planned(step)), step.slots, strict=True):
        assert read == Counter(slots.tolist())


def test_a_shared_prefix_is_read_once_for_all_rows() -> None:
    step = make_step(group_layout((8, 2048), private=16))
    plan = planned(step)
    assert num_read(plan) == 2048 + 8 * 16
    assert plan.num_saved_tokens == 7 * 2048


def test_a_short_row_is_not_padded_to_a_long_one() -> None:
    layout = StepLayout((), (4000, 17, 18, 16))
    step = make_step(layout)
    assert num_read(planned(step)) == 4000 + 3 * 18


def test_padding_of_a_bucket_stays_below_the_price_of_a_call() -> None:
    lengths = dict(enumerate([1, 1000, 998, 17, 300, 16, 700, 17]))
    chosen = buckets(lengths)
    assert sorted(row for rows in chosen for row in rows) == sorted(lengths)
    for rows in chosen:
        longest = max(lengths[row] for row in rows)
        assert sum(longest - lengths[row] for row in rows) <= CALL_TOKENS


def test_a_call_gathers_no_more_keys_than_stay_in_the_caches() -> None:
    chosen = buckets(dict.fromkeys(range(9), 2000) | {9: 10_000, 10: 10_000})
    assert [len(rows) for rows in chosen] == [1, 1, 4, 4, 1]


def test_consecutive_slots_are_sliced_from_the_pool() -> None:
    step = make_step(group_layout((4, 2048), private=2), permuted=False)
    keys = [part.keys for part in planned(step).parts]
    assert slice(0, 2048) in keys


def test_segments_too_small_for_a_call_are_read_with_the_private_tokens() -> None:
    step = make_step(group_layout((2, 60), (2, 60), private=1))
    plan = planned(step)
    assert len(plan.parts) == 1
    assert plan.num_saved_tokens == 0
