"""Cases of retraction, eviction, pins and pages: forks in a pool of 1024 tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from forking import (
    STRICT,
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
    reason_of,
    some_ids,
    together,
    wait_for,
)

from server import EXACT, Server, running_server

POOL, PAGE = 1024, 16


def small_server(pool_tokens: int, page: int) -> Any:
    """It lets in what does not fit once it has grown, so that rows are retracted."""
    size = ("--max-total-tokens", str(pool_tokens), "--max-running-requests", "32")
    eager = ("--schedule-conservativeness", "0.1")
    flags = ("--page-size", str(page), "--sleep-on-idle", *eager)
    return running_server(*EXACT, *flags, env=STRICT, pool=size)


@pytest.fixture(scope="module")
def small_pool() -> Iterator[Server]:
    with small_server(POOL, PAGE) as server:
        yield server


@pytest.fixture(scope="module")
def large_pages() -> Iterator[Server]:
    with small_server(2048, 64) as server:
        yield server


@pytest.fixture(autouse=True)
def _every_token_accounted_for(request: pytest.FixtureRequest) -> Iterator[None]:
    name = {"small_pool", "large_pages"} & set(request.fixturenames)
    server: Server = request.getfixturevalue(name.pop())
    server.set_policy(policy="eager")
    server.flush()
    yield
    assert_idle_pool(server)


def fill(server: Server, seed: object) -> None:
    """A stranger's request that evicts what is neither used nor pinned."""
    server.generate(plain(branch_of("", some_ids(seed, 700), max_new_tokens=2)))


# SGLang reserves all tokens of a request that ignores the end of sequence, and so never
# retracts it. These are never sampled instead: <|endoftext|> and <|im_end|>.
ENDLESS = {"ignore_eos": False, "logit_bias": {"0": -100, "2": -100}}


def too_many(group: str) -> list[dict[str, Any]]:
    """Branches that together outgrow the pool: 8 x (90 + 48) tokens."""
    more = {"max_new_tokens": 48, **ENDLESS}
    return [branch_of(group, some_ids(i, 90), i, 8, **more) for i in range(8)]


def num_retractions(server: Server) -> int:
    return server.text_of_log().count("KV cache pool is full. Retract requests")


def step_ms(server: Server) -> float:
    """Median of the decode steps of four rows with a short context."""
    first = counters(server)["num_steps"]
    group = new_group()
    bodies = [
        branch_of(group, some_ids(i, 20), i, 4, max_new_tokens=16) for i in range(4)
    ]
    server.generate(in_one_call(bodies))
    steps = [s for s in server.state()["recent_steps"] if s["step"] > first]
    return statistics.median(s["measured_ms"] for s in steps if s["measured_ms"])


def test_case_16_steps_are_as_fast_after_a_retraction_as_before(
    small_pool: Server,
) -> None:
    step_ms(small_pool)
    before_ms, retractions = step_ms(small_pool), num_retractions(small_pool)
    answers = small_pool.generate(in_one_call(too_many(new_group())))
    assert num_retractions(small_pool) > retractions
    assert {len(ids) for ids in ids_of(answers)} == {48}
    # The fault was a factor of 14; neighbours on the same cores make one of 2.
    assert step_ms(small_pool) < 4 * before_ms


def test_case_17_a_request_that_outgrows_the_pool_alone_does_not_end_the_server(
    small_pool: Server,
) -> None:
    body = branch_of(new_group(), some_ids("large", 900), max_new_tokens=3000)
    answer = small_pool.post("/generate", body)
    if answer.status_code == 200:
        assert reason_of(answer.json()) in ("length", "abort")
        assert answer.json()["meta_info"]["completion_tokens"] <= POOL - 900
    else:
        assert answer.json()["error"]["message"]
    assert small_pool.generate(branch_of(new_group(), some_ids("next", 20)))["text"]


def test_case_18_everything_may_be_retracted_in_one_step(small_pool: Server) -> None:
    groups = new_group(), new_group()
    bodies = [
        branch_of(groups[i % 2], some_ids(i, 40), i, 4, max_new_tokens=40)
        for i in range(4)
    ]
    expected = ids_of(alone(small_pool, bodies))
    small_pool.flush()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(small_pool.generate, body) for body in bodies]
        wait_for(lambda: small_pool.state()["num_running"] == 4)
        assert small_pool.post("/pause_generation", {"mode": "retract"}).ok
        wait_for(lambda: small_pool.state()["num_running"] == 0)
        assert small_pool.post("/continue_generation", {}).ok
        answers = [future.result() for future in running]
    assert ids_of(answers) == expected


def test_case_29_children_may_finish_in_any_order_before_an_eviction(
    small_pool: Server,
) -> None:
    group, ids = new_group(), some_ids("odd", 100)
    lengths = (9, 2, 7, 1, 5)
    bodies = [
        branch_of(group, [*ids, *some_ids(i, i)], i, 5, max_new_tokens=length)
        for i, length in enumerate(lengths)
    ]
    answers = small_pool.generate(in_one_call(bodies))
    assert tuple(map(len, ids_of(answers))) == lengths
    nested = [*ids, *answers[0]["output_ids"]]
    bodies = [branch_of(group, nested, i, 3, depth=2) for i in range(3)]
    assert (
        len({tuple(o) for o in ids_of(small_pool.generate(in_one_call(bodies)))}) == 1
    )
    small_pool.post("/abort_request", {"group": group})
    for seed in range(2):
        fill(small_pool, ("evict", seed))
        assert_idle_pool(small_pool)


def test_case_30_a_node_is_split_while_a_child_holds_it(small_pool: Server) -> None:
    group, ids = new_group(), some_ids("split", 160)
    holder = branch_of(group, ids, max_new_tokens=60)
    (expected,) = ids_of(alone(small_pool, [holder]))
    small_pool.flush()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(small_pool.generate, holder)
        wait_for(lambda: small_pool.state()["num_running"] == 1)
        for length in (100, 50):
            ours = branch_of(group, [*ids[:length], *some_ids(length, 9)], depth=1)
            strangers = plain(branch_of("", [*ids[:length], *some_ids("s", 9)]))
            together(small_pool, [ours, strangers])
        assert running.result()["output_ids"] == expected
    small_pool.post("/abort_request", {"group": group})
    fill(small_pool, "after the split")


def test_case_31_forks_of_a_prompt_of_half_the_pool_run_together(
    small_pool: Server,
) -> None:
    """Counted once per child, the prompt would not fit twice."""
    group, ids = new_group(), some_ids("half", 600)
    bodies = [branch_of(group, [*ids, *some_ids(i, 3)], i, 3) for i in range(3)]
    expected = ids_of(alone(small_pool, bodies))
    small_pool.flush()
    first = counters(small_pool)["num_steps"]
    assert ids_of(small_pool.generate(in_one_call(bodies))) == expected
    steps = [s for s in small_pool.state()["recent_steps"] if s["step"] > first]
    assert max(step["num_rows"] for step in steps) == 3


def test_case_32_many_short_forks_fit_into_large_pages(large_pages: Server) -> None:
    bodies = [
        branch_of(f"{new_group()[:8]}-{g}", some_ids((g, i), 30), i, 4)
        for g in range(10)
        for i in range(4)
    ]
    expected = ids_of(alone(large_pages, bodies[:2]))
    answers = large_pages.generate(in_one_call(bodies))
    assert ids_of(answers[:2]) == expected
    assert {len(ids) for ids in ids_of(answers)} == {8}


def test_case_35_the_prefix_of_a_group_stays_while_its_samples_arrive(
    small_pool: Server,
) -> None:
    group, ids = new_group(), some_ids("rollout", 256)
    small_pool.generate(branch_of(group, ids))
    for sample in range(6):
        fill(small_pool, ("pressure", sample))
        assert assert_idle_pool(small_pool)["pinned_tokens"] >= len(ids)
        meta = meta_of(small_pool.generate(branch_of(group, ids, sample, 6, depth=1)))
        assert meta["prefix_tokens_shared"] >= len(ids) - PAGE
        assert meta["tokens_prefilled"] <= PAGE
        assert meta["prefix_tokens_evicted"] == 0
        assert meta["prefix_tokens_pinned"] >= len(ids) - PAGE
    assert small_pool.post("/abort_request", {"group": group}).ok
    wait_for(lambda: small_pool.state()["pinned_tokens"] == 0)


def test_case_55_a_fork_of_512_completes_in_waves(small_pool: Server) -> None:
    body = branch_of(new_group(), some_ids("waves", 32), n=512, max_new_tokens=2)
    answers = small_pool.post("/generate", body, timeout=600).json()
    assert [meta_of(answer)["branch"] for answer in answers] == list(range(512))
    assert len({tuple(ids) for ids in ids_of(answers)}) == 1
    assert sum(map(prefilled, answers)) <= 512 * PAGE


def test_case_66_two_groups_beyond_the_pool_both_get_on(small_pool: Server) -> None:
    """Under `off` most rows wait; a request must not lose its only one."""
    small_pool.set_policy(policy="off")
    retractions = num_retractions(small_pool)
    bodies = [*too_many(new_group()), *too_many(new_group())]
    expected = ids_of(alone(small_pool, bodies[:2]))
    answers = small_pool.generate(in_one_call(bodies))
    assert ids_of(answers[:2]) == ids_of(answers[8:10]) == expected
    assert {len(ids) for ids in ids_of(answers)} == {48}
    assert num_retractions(small_pool) > retractions
