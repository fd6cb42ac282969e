"""Held prefills, on SGLang's own scheduler without a model (fork_engine.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
from fork_engine import ForkEngine
from fork_parts import Shape, engine_settings
from kv_truth import STOP_TOKEN, VOCAB_SIZE, next_hash, sample
from sglang.srt.managers import scheduler as sglang_scheduler

from sglang_taper.protocol import BranchMeta

HOLD_S = 0.5


def num_outputs(tokens: list[int], most: int) -> int:
    """Tokens a request with these says before it stops by itself."""
    hashed = 0
    for token in tokens:
        hashed = next_hash(hashed, token)
    for number in range(most):
        if (token := sample(hashed, None)) == STOP_TOKEN:
            return number
        hashed = next_hash(hashed, token)
    return most


def lasting(tokens: list[int], at_least: int = 12) -> list[int]:
    """`tokens` with two more, after which so many outputs follow."""
    ends = ([i, j] for i in range(VOCAB_SIZE - 1) for j in range(VOCAB_SIZE - 1))
    longer = (tokens + end for end in ends)
    return next(p for p in longer if num_outputs(p, at_least) == at_least)


PROMPT = lasting([i % 11 for i in range(38)])
A, B, C = (lasting([i, 3, 8]) for i in (1, 2, 3))


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def engine(request: pytest.FixtureRequest) -> Iterator[ForkEngine]:
    shape = Shape("rust", 1, request.param)
    with engine_settings(shape):
        yield ForkEngine(shape)


@pytest.fixture
def busy(engine: ForkEngine) -> ForkEngine:
    """An engine that decodes one request and holds prefills."""
    send(engine, "runs", lasting([7], 120), max_new=120)
    while not engine.running_batch.reqs:
        engine.step()
    hold(engine, HOLD_S)
    return engine


def hold(engine: ForkEngine, hold_s: str | float) -> None:
    taper = engine.taper
    taper.params = msgspec.structs.replace(taper.params, prefill_hold_s=hold_s)


def send(
    engine: ForkEngine, rid: str, tokens: list[int], max_new: int = 12, **meta: Any
) -> Any:
    return engine.send(rid, tokens, max_new, BranchMeta(**meta).to_wire())


def steps(engine: ForkEngine, number: int = 3, seconds: float = 0.0) -> None:
    for _ in range(number):
        engine.pass_time(seconds / number)
        engine.step()


def drain(engine: ForkEngine) -> None:
    while engine.step():
        pass


def running(engine: ForkEngine) -> set[str]:
    return {req.rid for req in engine.running_batch.reqs}


def test_prefills_wait_until_the_first_has_waited_its_hold_and_go_together(
    busy: ForkEngine,
) -> None:
    send(busy, "a", A)
    steps(busy, 3, 0.2)
    b = send(busy, "b", B)
    steps(busy, 3, 0.2)
    assert running(busy) == {"runs"}
    assert len(busy.waiting_queue) == 2
    steps(busy, 4, 0.4)
    assert running(busy) == {"runs", "a", "b"}
    counters = busy.taper.counters
    assert counters.num_prefills_held == 2
    assert counters.sum_prefill_held_ms == pytest.approx(
        sum(r.taper.prefill_held_ms for r in busy.running_batch.reqs)
    )
    assert 250 < b.taper.prefill_held_ms < HOLD_S * 1000
    drain(busy)


def test_nothing_is_held_when_nothing_decodes(engine: ForkEngine) -> None:
    hold(engine, 5.0)
    send(engine, "a", A)
    steps(engine)
    assert running(engine) == {"a"}
    held = send(engine, "b", B)
    drain(engine)
    assert held.finished()
    assert engine.taper.counters.num_prefills_held == 1


def test_off_holds_nothing_and_lets_go_what_was_held(busy: ForkEngine) -> None:
    send(busy, "a", A)
    steps(busy)
    assert running(busy) == {"runs"}
    hold(busy, "off")
    steps(busy)
    assert running(busy) == {"runs", "a"}
    assert busy.taper.counters.num_prefills_held == 1
    drain(busy)


def test_who_waits_when_a_prefill_is_let_go_is_not_held_again(
    busy: ForkEngine,
) -> None:
    """A pass has room for 48 tokens; the others go in the next ones."""
    for i in range(4):
        send(busy, f"r{i}", lasting([i, *PROMPT[:30]]))
    steps(busy, 6, 0.9)
    steps(busy, 4)
    assert running(busy) == {"runs", "r0", "r1", "r2", "r3"}
    drain(busy)


def test_a_chunked_prefill_goes_on_and_takes_the_others_with_it(
    engine: ForkEngine,
) -> None:
    send(engine, "runs", lasting([7], 120), max_new=120)
    steps(engine)
    send(engine, "long", lasting([3, *PROMPT, *PROMPT, *PROMPT]))
    engine.step()
    assert engine.chunked_req is not None
    hold(engine, HOLD_S)
    send(engine, "late", C)
    steps(engine, 6)
    assert running(engine) == {"runs", "long", "late"}
    assert engine.taper.counters.num_prefills_held == 0
    drain(engine)


def test_branches_that_need_no_prefill_start_while_others_are_held(
    busy: ForkEngine,
) -> None:
    parent = send(busy, "parent", PROMPT, group="g")
    steps(busy, 6, 0.9)
    assert "parent" in running(busy)
    stranger = send(busy, "stranger", C)
    known = [*parent.origin_input_ids, *parent.output_ids]
    for i in range(3):
        send(busy, f"c{i}", known, group="g", depth=1, width=3, branch=i)
    steps(busy, 1)
    assert {"c0", "c1", "c2"} <= running(busy)
    assert stranger in busy.waiting_queue
    assert all(req.taper.prefill_held_ms == 0 for req in busy.running_batch.reqs[2:])
    drain(busy)
    assert stranger.finished()


def test_siblings_that_wait_for_one_of_them_are_not_held_behind_it(
    busy: ForkEngine,
) -> None:
    fork = {"group": "g", "depth": 1, "width": 4}
    texts = [lasting([*PROMPT, i]) for i in range(4)]
    reqs = [send(busy, f"r{i}", texts[i], branch=i, **fork) for i in range(4)]
    steps(busy, 3, 0.4)
    assert running(busy) == {"runs"}
    steps(busy, 5, 0.5)
    assert running(busy) == {"runs", "r0", "r1", "r2", "r3"}
    assert sum(req.taper.num_prefilled for req in reqs) == len(PROMPT) + 4 * 3
    drain(busy)


def test_a_retracted_row_is_not_held(busy: ForkEngine) -> None:
    send(busy, "other", lasting(PROMPT, 60), max_new=60)
    steps(busy, 6, 0.9)
    assert running(busy) == {"runs", "other"}
    with mock.patch.multiple(
        sglang_scheduler, TEST_RETRACT=True, TEST_RETRACT_INTERVAL=1
    ):
        busy.step()
    assert [req.output_ids for req in busy.waiting_queue] != []
    held_before = busy.taper.counters.num_prefills_held
    steps(busy, 3)
    assert running(busy) == {"runs", "other"}
    assert busy.taper.counters.num_prefills_held == held_before
    drain(busy)


def test_what_is_held_is_looked_at_again_only_when_something_changes(
    busy: ForkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(busy, "a", PROMPT, group="g")
    steps(busy, 2)
    with monkeypatch.context() as patch:
        patch.setattr(busy._forks, "_match_all", None)
        steps(busy, 10, 0.1)
    send(busy, "b", PROMPT, group="g", depth=1)
    with monkeypatch.context() as patch:
        patch.setattr(busy._forks, "_match_all", None)
        with pytest.raises(TypeError):
            busy.step()


def test_a_held_request_can_be_aborted(busy: ForkEngine) -> None:
    req = send(busy, "a", A)
    steps(busy)
    busy.abort("a")
    steps(busy, 3, 1.0)
    assert running(busy) == {"runs"}
    assert req.taper.ended
    assert busy.taper.counters.sum_prefill_held_ms == 0
    drain(busy)


def test_with_preemption_a_prefill_is_held_and_then_makes_room(
    busy: ForkEngine,
) -> None:
    busy.enable_priority_preemption = True
    busy.priority_scheduling_preemption_threshold = 0
    send(busy, "a", A)
    steps(busy, 3, 0.3)
    assert running(busy) == {"runs"}
    steps(busy, 4, 0.4)
    assert "a" in running(busy)
    drain(busy)
