"""What a fork computes, on SGLang's own scheduler without a model (fork_engine.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fork_engine import ForkEngine
from fork_parts import Shape, engine_settings

from sglang_taper.engine.forks import ForkAdmission
from sglang_taper.protocol import BranchMeta

PROMPT = [i % 11 for i in range(160)]
FORK = {"group": "g", "depth": 1, "width": 4}


@pytest.fixture(params=[1, 16], ids=["page-1", "page-16"])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def engine(request: pytest.FixtureRequest, page_size: int) -> Iterator[ForkEngine]:
    shape = Shape("rust", page_size, request.param)
    with engine_settings(shape):
        yield ForkEngine(shape)


def send(engine: ForkEngine, rid: str, tokens: list[int], **meta: Any) -> Any:
    return engine.send(rid, tokens, 12, BranchMeta(**meta).to_wire())


def drain(engine: ForkEngine) -> None:
    while engine.step():
        pass


def prefilled(reqs: list[Any]) -> int:
    return sum(req.taper.num_prefilled for req in reqs)


def test_siblings_that_come_together_compute_their_prompt_once(
    engine: ForkEngine,
) -> None:
    """In four chunks; at the end of a page nothing is left to copy."""
    prompt = PROMPT[:145]
    reqs = [send(engine, f"r{i}", prompt, branch=i, **FORK) for i in range(4)]
    drain(engine)
    assert prefilled(reqs) == len(prompt)
    assert [req.taper.is_aliased for req in reqs] == [False, True, True, True]


def test_siblings_that_end_inside_a_page_copy_it(
    engine: ForkEngine, page_size: int
) -> None:
    prompt = [2, *PROMPT[:40]]
    reqs = [send(engine, f"r{i}", prompt, branch=i, **FORK) for i in range(4)]
    drain(engine)
    assert len(reqs[0].output_ids) > 2, "nobody runs on the page any more"
    assert prefilled(reqs) == len(prompt)
    num_copied = (len(prompt) - 1) % page_size
    assert [req.taper.num_copied for req in reqs] == [0, *[num_copied] * 3]


def test_siblings_with_text_of_their_own_compute_that_only(
    engine: ForkEngine, page_size: int
) -> None:
    prompt = PROMPT[:144]
    reqs = [
        send(engine, f"r{i}", [*prompt, i, i, i], branch=i, **FORK) for i in range(4)
    ]
    drain(engine)
    assert prefilled(reqs) == len(prompt) + 4 * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_prompts_that_begin_alike_are_computed_once_in_any_order(
    engine: ForkEngine, page_size: int, order: tuple[int, ...]
) -> None:
    prompts = [PROMPT[:33], PROMPT[:97], PROMPT[:145]]
    reqs = [
        send(engine, f"r{i}", prompts[i], group="g", depth=1, width=3, branch=i)
        for i in order
    ]
    drain(engine)
    # Nobody waits a pass for a single token; a match ends at a page.
    assert prefilled(reqs) - len(prompts[-1]) <= 2 * max(1, page_size - 1)


def test_siblings_do_not_wait_for_each_other_to_share_one_token(
    engine: ForkEngine,
) -> None:
    send(engine, "warm", PROMPT[:144], **FORK)
    drain(engine)
    reqs = [
        send(engine, f"r{i}", [*PROMPT[:144], 7, i, i], branch=i, **FORK)
        for i in range(4)
    ]
    drain(engine)
    assert prefilled(reqs) == 4 * 3
    assert engine.taper.counters.num_siblings_held == 0


def test_a_fork_of_many_starts_in_one_pass(engine: ForkEngine) -> None:
    """Rows that prefill nothing take nothing of the chunk that a pass may prefill."""
    send(engine, "warm", PROMPT[:145], **FORK)
    drain(engine)
    wide = {"group": "g", "stage": 1, "depth": 1, "width": 8}
    reqs = [send(engine, f"r{i}", PROMPT[:145], branch=i, **wide) for i in range(8)]
    engine.step()
    assert len(engine.running_batch.reqs) == 8
    assert all(req.taper.is_aliased for req in reqs)
    drain(engine)


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_child_of_a_decoding_parent_computes_nothing(
    engine: ForkEngine, page_size: int, steps: int
) -> None:
    parent = send(engine, "parent", PROMPT[:20], group="g")
    while len(parent.output_ids) < steps:
        engine.step()
    known = [*parent.origin_input_ids, *parent.output_ids[:steps]]
    child = send(engine, "child", known, **{**FORK, "width": 1}, parent="parent")
    drain(engine)
    assert child.taper.is_aliased or page_size > 1
    assert child.taper.num_prefilled < page_size + 1
    if page_size == 1:
        assert child.taper.num_prefilled == 0


def test_a_stranger_does_not_wait_for_a_fork(engine: ForkEngine) -> None:
    fork = [send(engine, f"r{i}", PROMPT[:60], branch=i, **FORK) for i in range(4)]
    plain = send(engine, "plain", PROMPT[:60])
    drain(engine)
    assert plain.taper.num_prefilled == 0
    assert plain.finished()
    assert all(req.finished() for req in fork)
    assert engine.taper.counters.num_siblings_held > 0


def test_requests_of_an_embedding_model_are_left_alone(engine: ForkEngine) -> None:
    """SGLang makes them without our extension point, so they carry nothing of ours."""
    engine.is_generation = False
    admission = ForkAdmission(engine, engine.taper)
    queue: list[Any] = [object(), object()]
    engine.waiting_queue = queue
    with admission.prefill_pass(engine.running_batch):
        assert engine.waiting_queue is queue
    assert engine.waiting_queue is queue


def test_a_queue_that_waits_for_room_is_not_looked_at_in_every_step(
    engine: ForkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.send("runs", [3] * 40, 300, {"group": "other"})
    for _ in range(3):
        engine.step()
    meta = {"group": "g", "depth": 1, "width": 3}
    fork = [
        engine.send(f"r{i}", [i] * 145, 40, BranchMeta(branch=i, **meta).to_wire())
        for i in range(3)
    ]
    engine.step()
    assert engine.running_batch.batch_is_full
    with monkeypatch.context() as patch:
        patch.setattr(engine._forks, "_visible", None)
        for _ in range(10):
            engine.step()
    assert len(engine.waiting_queue) == 3
    # What stood behind it goes on as soon as it is given up.
    behind = engine.send("behind", [5] * 10, 4, {})
    for req in fork:
        engine.abort(req.rid)
    for _ in range(12):
        engine.step()
    assert behind.finished()
    drain(engine)


def test_a_branch_whose_grammar_is_ready_within_a_pass_starts_once(
    engine: ForkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang queues it after the queue was looked at: it was left there, and started
    again, as a second row of the same request."""
    first = send(engine, "first", PROMPT[:64], branch=0, **FORK)
    while len(first.output_ids) < 2:
        engine.step()
    late = send(engine, "late", PROMPT[:64], branch=1, **FORK)
    engine.waiting_queue.remove(late)
    ready = [[late]]
    monkeypatch.setattr(
        engine,
        "grammar_manager",
        SimpleNamespace(
            has_waiting_grammars=lambda: bool(ready),
            get_ready_grammar_requests=ready.pop,
            grammar_queue=[],
        ),
    )
    engine.step()
    assert late.taper.is_aliased
    assert engine.running_batch.reqs.count(late) == 1
    assert late not in engine.waiting_queue
    drain(engine)
    assert len(late.output_ids) == len(first.output_ids)
