"""Pins, on SGLang's own tree and scheduler without a model (fork_engine.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fork_engine import ForkEngine
from fork_parts import MAX_PINNED_FRACTION, TTL_S, Shape, engine_settings

from sglang_taper.protocol import BranchMeta

PROMPT = [i % 11 for i in range(60)]
OTHER = [(3 * i + 1) % 11 for i in range(60)]


@pytest.fixture(params=("rust", "python"))
def engine(request: pytest.FixtureRequest) -> Iterator[ForkEngine]:
    shape = Shape(request.param, page_size=1, overlap=False)
    with engine_settings(shape):
        yield ForkEngine(shape)


class Client:
    """Sends requests of one engine, each under a new id."""

    def __init__(self, engine: ForkEngine) -> None:
        self.engine = engine
        self.num_sent = 0

    def send(self, tokens: list[int], max_new: int = 2, **meta: Any) -> Any:
        self.num_sent += 1
        wire = BranchMeta(**meta).to_wire() if meta else {}
        return self.engine.send(f"r{self.num_sent}", tokens, max_new, wire)

    def run(self, tokens: list[int], max_new: int = 2, **meta: Any) -> Any:
        req = self.send(tokens, max_new, **meta)
        self.drain()
        return req

    def drain(self) -> None:
        while self.engine.step():
            pass

    @property
    def protected(self) -> int:
        return int(self.engine.tree_cache.protected_size())

    @property
    def num_pins(self) -> int:
        return len(self.engine.taper.pins)


@pytest.fixture
def client(engine: ForkEngine) -> Client:
    return Client(engine)


def test_what_a_serial_stage_has_computed_stays_until_the_ttl(client: Client) -> None:
    req = client.run(PROMPT, group="g")
    assert client.protected == len(PROMPT) + len(req.output_ids) - 1
    client.engine.pass_time(TTL_S / 2)
    client.engine.step()
    assert client.num_pins == 1
    client.engine.pass_time(TTL_S)
    client.engine.step()
    assert client.protected == client.num_pins == 0
    assert client.engine.taper.pins.num_expired == 1


def test_the_next_stage_replaces_the_pin_of_the_one_before(client: Client) -> None:
    first = client.run(PROMPT, group="g")
    text = [*first.origin_input_ids, *first.output_ids, 1, 2, 3]
    second = client.run(text, group="g", stage=1)
    assert client.num_pins == 1
    assert client.protected == len(text) + len(second.output_ids) - 1


def test_a_request_without_a_group_is_not_pinned(client: Client) -> None:
    client.run(PROMPT)
    assert client.protected == 0


def test_the_last_branch_of_a_fork_takes_its_pin_away(client: Client) -> None:
    client.run(PROMPT, max_new=0, group="g", depth=1, width=2)
    assert client.protected == len(PROMPT)
    client.run(PROMPT, group="g", depth=1, width=2, branch=0)
    assert client.protected == len(PROMPT)
    client.run(PROMPT, group="g", depth=1, width=2, branch=1)
    assert client.protected == client.num_pins == 0


def test_siblings_that_come_one_by_one_need_no_parent(client: Client) -> None:
    for branch in range(3):
        client.run(PROMPT, group="g", depth=1, width=4, branch=branch)
        assert client.protected >= len(PROMPT)
    client.run(PROMPT, group="g", depth=1, width=4, branch=3)
    assert client.protected == 0


def test_a_nested_fork_leaves_the_pin_of_the_outer_one(client: Client) -> None:
    root = client.run(PROMPT, max_new=0, group="g")
    outer = {"group": "g", "depth": 1, "width": 2, "stage": 1, "parent": root.rid}
    commit = client.run([*PROMPT, 1], max_new=0, **outer)
    inner = {"group": "g", "depth": 2, "width": 2, "stage": 2, "parent": commit.rid}
    for branch in range(2):
        client.run([*PROMPT, 1], branch=branch, **inner)
    assert client.protected == len(PROMPT)
    for branch in range(2):
        client.run(PROMPT, branch=branch, **outer)
    assert client.protected == 0


def test_an_abort_of_all_that_lives_takes_the_pins_along(client: Client) -> None:
    client.run(PROMPT, max_new=0, group="g")
    child = client.send(PROMPT, 30, group="g", depth=1, width=2)
    for _ in range(4):
        client.engine.step()
    client.engine.abort(child.rid)
    client.drain()
    assert client.protected == client.num_pins == 0


def test_a_group_abort_unpins_at_once_and_others_stay(client: Client) -> None:
    client.run(PROMPT, max_new=0, group="g")
    client.run(OTHER, max_new=0, group="other")
    client.engine._abort_group("g", client.engine.now_ms)
    assert client.num_pins == 1
    assert client.protected == len(OTHER)


def test_a_flush_forgets_the_pins(client: Client) -> None:
    client.run(PROMPT, group="g")
    assert client.engine.flush_cache(empty_cache=False)
    assert client.num_pins == 0
    client.run(PROMPT, group="g")
    assert client.num_pins == 1


def test_over_the_limit_the_oldest_idle_pin_goes_first(client: Client) -> None:
    limit = int(MAX_PINNED_FRACTION * client.engine.max_total_num_tokens)
    number = limit // len(PROMPT) + 1
    for index in range(number):
        client.run([index, *PROMPT[1:]], max_new=0, group=f"g{index}")
    pins = client.engine.taper.pins
    assert pins.num_tokens <= limit
    assert pins.num_dropped == 1
    groups = client.engine.taper.groups.groups
    assert not list(pins.of(groups["g0"]))
    assert list(pins.of(groups[f"g{number - 1}"]))


def test_a_pin_without_a_known_fork_goes_before_an_announced_one(
    client: Client,
) -> None:
    client.run(PROMPT, max_new=0, group="announced")
    client.run(OTHER, group="guess")
    pins, groups = client.engine.taper.pins, client.engine.taper.groups.groups
    assert pins.drop_oldest_idle()
    assert not list(pins.of(groups["guess"]))
    assert not pins.drop_oldest_idle(only_unannounced=True)
    assert pins.drop_oldest_idle()
    assert client.protected == 0


def test_a_pin_follows_when_its_node_is_split(client: Client) -> None:
    client.run(PROMPT, max_new=0, group="g")
    client.run([*PROMPT[:30], 9, 9, 9])
    assert client.protected == len(PROMPT)
    client.engine._abort_group("g", client.engine.now_ms)
    assert client.protected == 0
    client.engine.tree_cache.sanity_check()


def test_a_pinned_prefix_survives_pressure_and_an_unpinned_one_is_counted(
    client: Client,
) -> None:
    client.run(PROMPT, max_new=0, group="g", depth=1, width=2)
    client.run(OTHER, group="lost")
    client.engine.taper.pins.drop_oldest_idle(only_unannounced=True)
    for index in range(8):
        client.run([index] * 120, max_new=20)
    child = client.run(PROMPT, group="g", depth=1, width=2)
    assert child.taper.num_pinned == len(PROMPT) - 1
    assert child.taper.num_prefilled == child.taper.num_evicted == 0
    lost = client.run([*OTHER, 5], group="lost")
    assert lost.taper.num_evicted == len(OTHER)


def test_pins_never_keep_waiting_requests_out_for_ever(client: Client) -> None:
    for index in range(3):
        client.run([index, *PROMPT[1:]], max_new=0, group=f"g{index}")
    size = client.engine.max_total_num_tokens - 100
    large = client.run([7] * min(size, 380), max_new=1)
    assert large.finished()
    assert len(large.output_ids) == 1


def test_a_waiting_branch_does_not_wait_for_the_pin_of_its_own_group(
    client: Client,
) -> None:
    client.run([i % 7 for i in range(200)], group="g")
    assert client.num_pins == 1
    other_text = client.run([(i + 3) % 11 for i in range(330)], group="g", stage=1)
    assert len(other_text.output_ids) == 2


def test_a_running_row_is_not_aborted_for_a_pin_of_its_own_group(
    client: Client,
) -> None:
    client.run([*PROMPT, *OTHER], max_new=0, group="g")
    row = client.run([5] * 20, max_new=375, group="g", depth=1, width=2)
    reason = row.finished_reason.to_json()
    assert reason["type"] != "abort", reason


def test_a_context_beyond_the_limit_takes_no_other_pin_away(client: Client) -> None:
    client.run(PROMPT, max_new=0, group="g")
    client.run([i % 7 for i in range(300)], group="large")
    assert client.num_pins == 1
    assert client.protected == len(PROMPT)


def test_an_abort_of_a_subtree_takes_the_pins_it_left(client: Client) -> None:
    parent = client.run(PROMPT, max_new=0, group="g", depth=1, width=2)
    client.engine._abort_group("g", client.engine.now_ms, parent.rid)
    assert client.num_pins == 0


def test_a_guess_takes_no_announced_pin_away(client: Client) -> None:
    announced = [[index, *PROMPT[1:]] for index in range(3)]
    for index, tokens in enumerate(announced):
        client.run(tokens, max_new=0, group=f"announced{index}")
    client.run(OTHER, group="guess")
    pins = client.engine.taper.pins
    assert pins.num_dropped == 1, "the guess itself"
    assert client.num_pins == len(announced)
    assert client.protected == sum(map(len, announced))


def test_no_pin_is_given_up_for_one_that_fits_nowhere(client: Client) -> None:
    client.run(PROMPT, group="small")
    busy = client.send([5] * 120, 60, group="busy", depth=1, width=2)
    while not busy.output_ids:
        client.engine.step()
    client.run([9] * 100, max_new=0, group="large")
    pins, groups = client.engine.taper.pins, client.engine.taper.groups.groups
    assert list(pins.of(groups["small"]))
    assert pins.num_tokens <= MAX_PINNED_FRACTION * client.engine.max_total_num_tokens


def test_the_pin_of_a_fork_grows_to_what_its_siblings_share(client: Client) -> None:
    """The first one found only a part in the tree, the second one all they share."""
    client.run(PROMPT[:20])
    fork = {"group": "g", "depth": 1, "width": 3}
    client.run([*PROMPT, 1], branch=0, **fork)
    assert client.protected == 20
    client.run([*PROMPT, 2], branch=1, **fork)
    assert client.protected == len(PROMPT)


def test_other_salts_are_not_counted_as_lost(client: Client) -> None:
    send = client.engine.send
    wire = BranchMeta(group="g").to_wire()
    send("one", PROMPT, 2, wire, salt="a")
    client.drain()
    other = send("two", PROMPT, 2, wire, salt="b")
    client.drain()
    assert other.taper.num_prefilled == len(PROMPT)
    assert other.taper.num_recomputed == other.taper.num_evicted == 0
