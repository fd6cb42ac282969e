"""The state machine of a front end: order, bounds, ends, and wrong programs."""

from __future__ import annotations

import pytest
from front_end_play import END, Played, plain, until_stop

from sglang_taper.errors import FrontEndError
from sglang_taper.front_ends.run import ProgramRun
from sglang_taper.front_ends.types import Part, Prompt


class Scripted:
    """Yields the stages it was given; keeps what it was told."""

    def __init__(self, *stages):
        self.stages, self.told = stages, []

    def run(self, prompt):
        for stage in self.stages:
            self.told.append((yield stage))


def started(*stages, max_new_tokens=None):
    front_end = Scripted(*stages)
    run = ProgramRun("a", front_end, Prompt("p"), max_new_tokens)
    return run, front_end, run.start()


STOP = {"type": "stop", "matched": END}


def test_the_answer_is_in_order_whatever_the_order_of_the_branches() -> None:
    run, _, _ = started([Part(lead="1:"), Part(lead="2:")])
    run.hear(1, "bb", [98, 98])
    assert run.text == "1:"
    run.hear(0, "a", [97])
    assert run.text == "1:a"
    run.end(1, STOP)
    assert run.text == "1:a"
    run.end(0, STOP)
    assert run.text == "1:a2:bb"


def test_a_stage_follows_when_its_last_branch_has_ended() -> None:
    later = Part(prompt=("x",))
    run, front_end, _ = started([Part(), Part()], [later])
    run.hear(0, "a", [97, END])
    assert run.end(1, STOP) == ()
    assert run.end(0, STOP) == (later,)
    ((first, second),) = front_end.told
    assert (first.text, first.ids, second.ids) == ("a", (97,), ())
    assert run.finish_reason is None
    assert run.end(0, STOP) == ()
    assert run.finish_reason == STOP


def test_a_part_that_is_not_shown_is_told_and_not_in_the_answer() -> None:
    run, front_end, _ = started([Part(shown=False)], [Part(lead="so ")])
    run.hear(0, "secret", [1, 2])
    assert run.text == ""
    run.end(0, {"type": "length", "length": 2})
    run.hear(0, "open", [3])
    run.end(0, STOP | {"matched": None})
    assert run.text == "so open"
    assert run.pieces == ("so ", (3,))
    assert front_end.told[0][0].text == "secret"


@pytest.mark.parametrize("matched", [".", END, None])
def test_the_tail_is_put_where_the_text_does_not_end_with_a_stop_text(matched) -> None:
    for text, stopped_by in (("a.", "."), ("a", None)):
        run, front_end, _ = started([Part(stop=(".",), tail=";")], [Part()])
        run.hear(0, text, [*map(ord, text)])
        run.hear(0, "", [END] if matched == END else [])
        run.end(0, {"type": "stop", "matched": matched})
        ((said,),) = front_end.told
        assert said.stopped_by == stopped_by
        assert run.text == plain(said.pieces) == ("a." if stopped_by else "a;")


def test_what_only_ended_a_part_is_taken_off() -> None:
    run, _, _ = started([Part()])
    run.hear(0, "word<end>", [5, END])
    run.end(0, STOP, "<end>")
    assert (run.text, run.pieces) == ("word", ((5,),))
    assert run.num_generated_tokens == 2


def test_the_bound_counts_serial_parts_and_the_longest_branch_of_a_fork() -> None:
    fork = [Part(), Part()]
    played = Played(
        Scripted([Part()], fork, [Part()], [Part()]),
        "p",
        ["abc", "de", "f", "g" * 50],
        12,
    )
    # 4 with the end, 3, and then 5 are left
    assert played.run.text == "abcdefggggg"
    assert played.run.finish_reason == {"type": "length", "length": 12}
    assert [len(stage) for stage in played.stages] == [1, 2, 1]


def test_a_part_may_have_a_bound_of_its_own() -> None:
    own = Part(sampling_params={"max_new_tokens": 4})
    run, _, _ = started([own], max_new_tokens=9)
    assert run.max_new_tokens_of(own) == 4
    assert run.max_new_tokens_of(Part()) == 9
    half = Part(max_share=0.5)
    assert run.max_new_tokens_of(half) == 4
    assert started([half], max_new_tokens=1)[0].max_new_tokens_of(half) == 1
    assert started([half], max_new_tokens=0)[0].max_new_tokens_of(half) == 0
    unbounded, _, _ = started([own])
    assert unbounded.max_new_tokens_of(Part()) is None


def test_a_program_whose_branches_are_all_aborted_ends() -> None:
    aborted = {"type": "abort", "message": "m"}
    run, front_end, _ = started([Part(), Part()], [Part()])
    run.end(0, aborted)
    assert run.end(1, aborted) == ()
    assert run.finish_reason == aborted
    assert front_end.told == []


def test_a_branch_that_is_aborted_alone_is_one_that_ended() -> None:
    run, front_end, _ = started([Part(), Part()], [Part()])
    run.hear(0, "a", [97])
    run.end(0, {"type": "abort", "message": "m"})
    assert len(run.end(1, STOP)) == 1
    assert front_end.told[0][0].text == "a"


def test_a_program_can_be_stopped_from_outside() -> None:
    run, _, _ = started([Part(), Part()], [Part()])
    run.hear(0, "a", [97])
    run.stop({"type": "abort"})
    assert run.finish_reason == {"type": "abort"}
    assert run.text == "a"


class Failing:
    def run(self, prompt):
        yield [Part()]
        raise KeyError("point")


@pytest.mark.parametrize(
    ("front_end", "reason"),
    [
        (Scripted(), "it generates nothing"),
        (Scripted([]), "a stage must be a list of parts"),
        (Scripted(Part()), "a stage must be a list of parts"),
        (Scripted(["text"]), "a stage must be a list of parts"),
        (Scripted([Part()] * 4097), "4097 branches"),
        (Failing(), "KeyError('point')"),
    ],
)
def test_a_front_end_that_fails_is_named_with_the_reason(front_end, reason) -> None:
    run = ProgramRun("mine", front_end, Prompt("p"), None)
    with pytest.raises(FrontEndError) as error:
        _ = run.start() and run.end(0, STOP)
    assert str(error.value).startswith("front end mine failed: ")
    assert reason in str(error.value)


def test_the_played_engine_stops_as_sglang_does() -> None:
    assert until_stop("ab.c", (".",), None) == (
        "ab.",
        [97, 98, 46],
        {"type": "stop", "matched": "."},
    )
    assert until_stop("ab", (".",), 1)[2] == {"type": "length", "length": 1}
    assert until_stop("ab", (), None)[1] == [97, 98, END]
