"""Cases of sessions, of attention that reads a shared prefix once, and of batches."""

from __future__ import annotations

from typing import Any

import pytest
from forking import (
    alone,
    branch_of,
    ids_of,
    in_one_call,
    meta_of,
    new_group,
    plain,
    prefilled,
    some_ids,
    together,
)

from server import Server


@pytest.fixture(autouse=True)
def _everything_runs(taper_server: Server) -> None:
    taper_server.set_policy(policy="eager")
    taper_server.flush()


def turns(server: Server, group: str, count: int) -> list[list[int]]:
    """The ids of a conversation after each turn: 60 asked, 8 answered."""
    ids: list[int] = []
    after = []
    for turn in range(count):
        ids = [*ids, *some_ids(("turn", turn), 60)]
        answer = server.generate(branch_of(group, ids))
        ids = [*ids, *answer["output_ids"]]
        after.append(ids)
    return after


def test_case_34_a_branch_at_turn_two_computes_nothing_of_the_turns_before(
    taper_server: Server,
) -> None:
    group = new_group()
    second = turns(taper_server, group, 4)[1]
    bodies = [
        branch_of(group, [*second, *some_ids(("other", i), 5)], i, 2, depth=1)
        for i in range(2)
    ]
    answers = taper_server.generate(in_one_call(bodies))
    # Their own text, and the last token of the turn, whose KV was never needed.
    assert max(prefilled(answer) for answer in answers) <= 6
    assert all(
        meta_of(answer)["prefix_tokens_shared"] >= len(second) - 1 for answer in answers
    )
    expected = ids_of(alone(taper_server, bodies))
    assert ids_of(answers) == expected


def test_case_46_answers_do_not_depend_on_the_batch_they_are_in(
    taper_server: Server,
) -> None:
    """Forks and strangers of many lengths, 32 rows at once, against one by one."""
    groups = [new_group() for _ in range(4)]
    bodies = [
        branch_of(group, some_ids((g, i), 10 + 7 * i), i, 4, depth=1)
        for g, group in enumerate(groups)
        for i in range(4)
    ]
    bodies += [plain(branch_of("", some_ids(i, 5 + 11 * i))) for i in range(16)]
    expected = ids_of(alone(taper_server, bodies))
    taper_server.flush()
    assert ids_of(together(taper_server, bodies)) == expected


def shared_rows(server: Server) -> int:
    return int(server.state()["attention"]["num_shared_rows"])


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64])
def test_case_49_a_prefix_that_is_the_whole_prompt_is_no_special_case(
    taper_server: Server, length: int
) -> None:
    body = branch_of(new_group(), some_ids(("whole", length), length), n=4)
    one = plain(branch_of("", body["input_ids"]))
    expected = ids_of(alone(taper_server, [one]))
    before = shared_rows(taper_server)
    assert ids_of(taper_server.generate(body)) == expected * 4
    # Segments shorter than 16 tokens are left to the rows.
    assert (shared_rows(taper_server) > before) == (length > 16)


def test_case_52_two_parents_with_eight_children_each_share_two_prefixes(
    taper_server: Server,
) -> None:
    def children(seed: int) -> list[dict[str, Any]]:
        group, prefix = new_group(), some_ids(("parent", seed), 200)
        return [
            branch_of(group, [*prefix, *some_ids((seed, i), 2)], i, 8, depth=1)
            for i in range(8)
        ]

    bodies = [*children(0), *children(1)]
    expected = ids_of(alone(taper_server, bodies))
    taper_server.flush()
    before = taper_server.state()["attention"]
    assert ids_of(taper_server.generate(in_one_call(bodies))) == expected
    after = taper_server.state()["attention"]
    saved = after["num_saved_tokens"] - before["num_saved_tokens"]
    # In most of the seven steps each prefix is read once for its eight rows.
    assert saved >= 5 * 2 * 7 * 200
