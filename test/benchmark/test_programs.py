"""The forking programs: what they do, and what is recorded of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from goodput_lib.recording import RecordingEndpoint
from programs import PROGRAMS, Work, draw_work, main, run_program
from stand_in import StandIn

from sglang_taper.workload.shape import count_critical_tokens, count_tokens

WORK = Work("tree", "a ladder", 4, (3, 5, 4, 6, 2, 7), 2)
# (number of tokens, forks nested) of each program with that work
PHASES = {
    "tree": (2, (((3, ((7,), (7,)))), ((5, ((2,), (2,))))), 2),
    "chains": (2, ((3,), (5,), (4,), (6,)), 2),
    "skeleton": (2, ((3,), (5,), (4,), (6,)), 2),
    "judge": (4, ((3,), (5,), (4,), (6,)), 2),
    "chat": (3,),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_does_is_recorded_as_a_shape(name: str) -> None:
    with StandIn().running() as server:
        recording = RecordingEndpoint(server.url).recording()
        run_program(Work(name, *_rest(WORK)), recording)
    seen, shape = recording.finish(), recording.shape()
    assert shape.phases == PHASES[name]
    assert seen.num_tokens == count_tokens(PHASES[name])
    assert seen.num_critical_tokens == count_critical_tokens(PHASES[name])
    assert seen.is_decomposable == (name != "chat")
    assert len(seen.forks_ms) == {"tree": 3, "chat": 0}.get(name, 1)
    assert all(begin <= end for begin, end in seen.forks_ms)


def _rest(work: Work) -> tuple[Any, ...]:
    return work.subject, work.fan_out, work.part_tokens, work.closing_tokens


def test_the_first_token_is_not_a_gap_and_all_later_waits_are() -> None:
    with StandIn().running() as server:
        recording = RecordingEndpoint(server.url).recording()
        run_program(Work("chains", *_rest(WORK)), recording)
    seen = recording.finish()
    assert len(seen.gaps_ms) == seen.num_tokens - 1


def test_branches_of_a_program_are_one_group() -> None:
    with StandIn().running() as server:
        run_program(WORK, RecordingEndpoint(server.url).recording())
    metas = [b["sampling_params"]["custom_params"]["taper"] for b in server.bodies]
    assert len({meta["group"] for meta in metas}) == 1
    assert {meta.get("depth", 0) for meta in metas} == {0, 1, 2}


def test_the_same_seed_draws_the_same_work() -> None:
    first, again, other = (
        [draw_work(list(PROGRAMS), random.Random(seed), 20) for _ in range(3)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_an_error_of_the_server_is_raised() -> None:
    with StandIn(breaks=lambda _: True).running() as server:
        recording = RecordingEndpoint(server.url).recording()
        # What sglang.lang finds where the text should be.
        with pytest.raises(KeyError, match="text"):
            run_program(Work("chat", *_rest(WORK)), recording)


def test_each_program_can_be_run_by_name() -> None:
    shown: list[str] = []
    with StandIn().running() as server:
        assert main(["--base-url", server.url, "judge"], shown.append) == 0
    assert "judge: (" in shown[0]
    assert "Essay on" in shown[0]
