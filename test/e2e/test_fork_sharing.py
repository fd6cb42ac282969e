"""What a fork prefills: nothing that its request has computed (real server).

Twice: pages of 1, SGLang's default tree and overlap scheduling; pages of 16, the other
tree core and no overlap. Prefills go in chunks of 256 tokens. Where a page is filled
only in part, a child may compute what the page holds again: less than a page.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from forking import (
    STRICT,
    Answer,
    Variant,
    alone,
    assert_idle_pool,
    branch_of,
    counters,
    ids_of,
    in_one_call,
    meta_of,
    new_group,
    plain,
    prefilled,
    some_ids,
    stream,
    uncached,
    wait_for,
)
from workload import STORY

from server import EXACT, Server, running_server

FAN_OUT, PREFIX = 8, 1024
CHUNKS = ("--chunked-prefill-size", "256")
PAGES = ("--page-size", "16", "--disable-overlap-schedule")
OTHER_CORE = {**STRICT, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}


@pytest.fixture(
    scope="module",
    params=[(1, (), STRICT), (16, PAGES, OTHER_CORE)],
    ids=["page-1", "page-16"],
)
def variant(request: pytest.FixtureRequest) -> Iterator[Variant]:
    page, flags, env = request.param
    with running_server(*EXACT, *CHUNKS, *flags, env=env) as server:
        server.set_policy(policy="eager")
        yield Variant(server, page)


@pytest.fixture(autouse=True)
def _every_token_accounted_for(variant: Variant) -> Iterator[None]:
    variant.server.flush()
    yield
    assert_idle_pool(variant.server)


# -- the parent has finished, or there is none


def samples(server: Server, ids: list[int]) -> list[Answer]:
    """One request for all."""
    body = branch_of(new_group(), ids, n=FAN_OUT, max_new_tokens=32)
    return list(server.generate(body))


def siblings(
    server: Server,
    ids: list[int],
    own: int = 0,
    new_tokens: int = 4,
    group: str | None = None,
) -> list[Answer]:
    """One call, with `own` tokens of each: they come to the scheduler together."""
    group = group or new_group()
    more = {"depth": 1, "max_new_tokens": new_tokens}
    bodies = [
        branch_of(group, [*ids, *some_ids(i, own)], i, FAN_OUT, **more)
        for i in range(FAN_OUT)
    ]
    return list(server.generate(in_one_call(bodies)))


def children(
    server: Server, ids: list[int], own: int = 0, new_tokens: int = 32
) -> list[Answer]:
    """Of a parent that has computed the prefix and ended."""
    server.generate(branch_of(group := new_group(), ids, max_new_tokens=1))
    return siblings(server, ids, own, new_tokens, group)


FORKS: tuple[Callable[..., Any], ...] = (samples, children, siblings)


@pytest.fixture(scope="module")
def stock(stock_server: Server) -> dict[str, list[Answer]]:
    """The same forks in stock SGLang."""
    stock_server.flush()
    return {f.__name__: f(stock_server, some_ids(f.__name__, PREFIX)) for f in FORKS}


@pytest.mark.parametrize("fork", FORKS[:2])
def test_a_fork_of_1024_tokens_prefills_nothing_after_the_prefix(
    variant: Variant, stock: dict[str, list[Answer]], fork: Callable[..., Any]
) -> None:
    expected = stock[fork.__name__]
    answers = fork(variant.server, some_ids(fork.__name__, PREFIX))
    assert ids_of(answers) == ids_of(expected)
    assert sum(map(uncached, expected)) >= FAN_OUT
    assert sum(map(prefilled, answers)) <= FAN_OUT * variant.remainder
    if variant.page == 1:
        assert all(meta_of(answer)["row_aliased"] for answer in answers)


def test_siblings_that_arrive_together_prefill_their_prefix_once(
    variant: Variant, stock: dict[str, list[Answer]]
) -> None:
    expected = stock["siblings"]
    answers = siblings(variant.server, some_ids("siblings", PREFIX))
    assert ids_of(answers) == ids_of(expected)
    after = sum(map(prefilled, answers)) - PREFIX
    assert 0 <= after <= (FAN_OUT - 1) * variant.remainder
    assert sum(map(uncached, expected)) - PREFIX > max(FAN_OUT - 2, after)
    assert sum(meta_of(a)["tokens_recomputed"] for a in answers) <= after


@pytest.mark.parametrize(("own", "computed"), [(1, 0), (2, 2), (5, 5)])
def test_a_child_prefills_its_own_text_only(
    variant: Variant, own: int, computed: int
) -> None:
    """One own token is what its first decode step runs. The prefix fills its pages."""
    ids = some_ids("own", 256)
    answers = children(variant.server, ids, own, new_tokens=4)
    assert [prefilled(answer) for answer in answers] == [computed] * FAN_OUT
    assert all(meta_of(a)["row_aliased"] == (own == 1) for a in answers)
    assert all(meta_of(a)["prefix_tokens_shared"] == len(ids) for a in answers)
    body = branch_of("", [*ids, *some_ids(FAN_OUT - 1, own)], max_new_tokens=4)
    assert ids_of(answers[-1:]) == ids_of(alone(variant.server, [body]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_the_order_of_arrival_does_not_matter(
    variant: Variant, order: tuple[int, ...]
) -> None:
    """A prefix, a longer one and one that goes on where the longer one ends.
    test/engine/test_fork_work.py has the other orders."""
    longest = some_ids("order", 360)
    prompts = [longest[:120], longest[:250], longest]
    bodies = [branch_of("", ids, depth=i) for i, ids in enumerate(prompts)]
    expected = ids_of(alone(variant.server, bodies))
    variant.server.flush()
    group = new_group()
    bodies = [branch_of(group, prompts[i], depth=i) for i in order]
    answers = variant.server.generate(in_one_call(bodies))
    assert ids_of(answers) == [expected[i] for i in order]
    computed = sum(map(prefilled, answers)) - len(longest)
    assert 0 <= computed <= 2 * variant.remainder


# -- the parent is at work


class Parent:
    """A branch whose stream is watched; `on_tokens` gets its output as it grows."""

    def __init__(self, variant: Variant, prompt: list[int], new_tokens: int) -> None:
        self.server, self.prompt = variant.server, prompt
        self.group, self.rid = new_group(), uuid.uuid4().hex + "/"
        self.body = branch_of(self.group, prompt, max_new_tokens=new_tokens)

    def child(self, ids: list[int], branch: int, **more: Any) -> dict[str, Any]:
        return branch_of(self.group, ids, branch, 64, depth=1, parent=self.rid, **more)

    def run(self, on_tokens: Callable[[list[int]], None]) -> list[int]:
        """Its output, after it has ended."""
        output: list[int] = []
        for event in stream(self.server, {**self.body, "rid": self.rid}):
            output = event["output_ids"]
            on_tokens(output)
        return output


def test_a_child_of_a_decoding_parent_goes_on_as_its_parent_does(
    variant: Variant,
) -> None:
    """Forked at every step from 1 to 40."""
    server = variant.server
    answer = server.post("/tokenize", {"model": "smollm2", "prompt": STORY}).json()
    parent = Parent(variant, answer["tokens"], new_tokens=56)
    (undisturbed,) = alone(server, [parent.body])
    server.flush()
    running: dict[int, Future[Answer]] = {}
    with ThreadPoolExecutor(40) as pool:

        def fork(output: list[int]) -> None:
            for step in range(len(running) + 1, min(len(output), 40) + 1):
                ids = parent.prompt + output[:step]
                body = parent.child(ids, step, max_new_tokens=6)
                running[step] = pool.submit(server.generate, body)

        output = parent.run(fork)
        found = {step: future.result() for step, future in running.items()}
    assert output == undisturbed["output_ids"]
    assert list(found) == list(range(1, 41))
    for step, answer in found.items():
        assert answer["output_ids"] == output[step : step + 6], step
        assert prefilled(answer) <= variant.remainder, step
        assert meta_of(answer)["tokens_recomputed"] <= variant.remainder, step
        assert meta_of(answer)["tokens_copied"] < variant.page, step
        assert meta_of(answer)["row_aliased"] or variant.page > 1, step


def test_children_of_a_prefilling_parent_wait_for_what_it_computes(
    variant: Variant,
) -> None:
    """One adds nothing, one ends within the parent's prompt, three go on."""
    server, prompt = variant.server, some_ids("prefilling", 1200)
    parent = Parent(variant, prompt, new_tokens=4)
    ends = [prompt, prompt[:700], *([*prompt, *some_ids(i, 3)] for i in range(3))]
    bodies = [parent.child(ids, i, max_new_tokens=4) for i, ids in enumerate(ends)]
    expected = ids_of(alone(server, bodies[:3]))
    server.flush()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, {**parent.body, "rid": parent.rid})
        wait_for(lambda: server.state()["num_live_groups"] == 1)
        answers = server.generate(in_one_call(bodies))
        answer = running.result()
    assert ids_of([answer, *answers[:3]]) == [expected[0], *expected]
    assert prefilled(answer) == len(prompt)
    for child, own in zip(answers, (0, 0, 3, 3, 3), strict=True):
        assert prefilled(child) <= own + variant.remainder


def test_a_branch_aborted_at_its_second_chunk_leaves_nothing_behind(
    variant: Variant,
) -> None:
    """Three chunks of prompt: a fork shares them, its parent is aborted meanwhile."""
    server, prompt = variant.server, some_ids("chunks", 600)
    parent = Parent(variant, prompt, new_tokens=4)
    child = parent.child([*prompt, *some_ids("own", 3)], 0, max_new_tokens=4)
    (expected,) = ids_of(alone(server, [child]))
    server.flush()
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(server.generate, {**parent.body, "rid": parent.rid}),
            pool.submit(server.generate, child),
        ]
        wait_for(lambda: server.state()["num_live_groups"] == 1)
        assert server.post("/abort_request", {"rid": parent.rid}).status_code == 200
        aborted, answer = (future.result() for future in running)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"] == expected
    assert_idle_pool(server)
    assert server.generate(plain(child))["output_ids"] == expected


# -- what the server counts


def test_the_server_counts_what_its_answers_say(variant: Variant) -> None:
    before = counters(variant.server)
    answers = siblings(variant.server, some_ids("count", 200))
    answers += siblings(variant.server, some_ids("count", 200), own=3)
    after = counters(variant.server)
    for counter, key in {
        "num_prefilled_tokens": "tokens_prefilled",
        "num_rows_aliased": "row_aliased",
        "num_copied_tokens": "tokens_copied",
        "num_recomputed_tokens": "tokens_recomputed",
        "num_prefix_shared_tokens": "prefix_tokens_shared",
    }.items():
        told = sum(int(meta_of(answer)[key]) for answer in answers)
        assert after[counter] - before[counter] == told, counter
    assert after["num_siblings_held"] > before["num_siblings_held"]


def test_a_mode_without_aliasing_prefills_one_token_and_is_counted(
    variant: Variant,
) -> None:
    # All but the last token fill pages: inside one there would be nothing to alias.
    server, ids = variant.server, some_ids("penalty", 65)
    bodies = [branch_of("", ids, frequency_penalty=1.5)]
    (expected,) = ids_of(alone(server, bodies))
    server.flush()
    server.generate(branch_of(group := new_group(), ids, max_new_tokens=1))
    before = counters(server)["num_alias_fallbacks"]
    bodies = [branch_of(group, ids, i, 3, frequency_penalty=1.5) for i in range(3)]
    answers = server.generate(in_one_call(bodies))
    assert ids_of(answers) == [expected] * 3
    assert [prefilled(answer) for answer in answers] == [1] * 3
    assert not any(meta_of(answer)["row_aliased"] for answer in answers)
    assert counters(server)["num_alias_fallbacks"] - before == 3
