"""ThreadWeaver's tags, well formed and not, in any chunks, as a client would."""

from __future__ import annotations

import random
import re

import pytest
from front_end_play import Played, plain, until_stop
from hypothesis import given
from hypothesis import strategies as st

from sglang_taper.front_ends.threadweaver import ThreadWeaver, outline_labels

OUTLINES = "<Outlines>\n<Outline> 1: a</Outline>\n<Outline> 2: b</Outline>\n</Outlines>"
OPENED = f"Hm.\n<Parallel>\n{OUTLINES}"


def play(*scripts: str, prompt: str = "Q", bound: int | None = None) -> Played:
    return Played(ThreadWeaver(), prompt, scripts, bound)


def test_outlines_open_threads_and_the_model_goes_on_after_them() -> None:
    played = play(OPENED, " one</Thread>", " two", "</Parallel> So.")
    assert [len(stage) for stage in played.stages] == [1, 2, 1]
    assert played.run.text == (
        OPENED
        + "\n<Thread>\n1: one</Thread><Thread>\n2: two\n</Thread>\n</Parallel> So."
    )
    first, second = played.stages[1]
    assert plain(first.prompt) == OPENED + "\n<Thread>\n1:"
    assert plain(second.prompt) == OPENED + "\n<Thread>\n2:"
    (after,) = played.stages[2]
    assert plain(after.prompt) == played.run.text.removesuffix("</Parallel> So.")


def test_the_outline_may_begin_in_the_prompt() -> None:
    prompt = "Q <Outlines>\n<Outline> 7: a</Outline>"
    played = play("\n<Outline> 8: b</Outline></Outlines>", prompt=prompt)
    assert [plain(p.prompt)[-3:] for p in played.stages[1]] == ["\n7:", "\n8:"]


def test_blocks_follow_each_other_and_every_fork_sees_what_came_before() -> None:
    played = play(OPENED, "x</Thread>", "y</Thread>", OPENED, "z</Thread>", "", "end")
    assert [len(stage) for stage in played.stages] == [1, 2, 1, 2, 1]
    assert "2:y</Thread>\nHm." in plain(played.stages[3][0].prompt)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        (OUTLINES, ("1", "2")),
        ("<Outlines><Outline>1.2:a<Outline> 1.10 :b</Outlines>", ("1.2", "1.10")),
        ("<Outlines><Outline> 1: a<Outline> 1: b</Outlines>", ("1",)),
        ("<Outlines></Outlines>", ()),
        ("<Outlines><Outline> one: a</Outlines>", ()),
        ("<Outline> 1: a</Outlines>", ()),
        (OUTLINES + " and </Outlines>", ()),
        ("<Outlines><Outlines><Outline> 3: a</Outlines>", ("3",)),
        ("<Outlines><Outline> 1: a</Thread></Outlines>", ()),
        (
            "<Outlines>"
            + "".join(f"<Outline> {i}: a" for i in range(32))
            + "</Outlines>",
            tuple(map(str, range(32))),
        ),
        (
            "<Outlines>"
            + "".join(f"<Outline> {i}: a" for i in range(33))
            + "</Outlines>",
            (),
        ),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_labels_of_an_outline_block(text: str, labels: tuple[str, ...]) -> None:
    assert outline_labels(text) == labels


@pytest.mark.parametrize(
    "text", ["<Outlines></Outlines>", "</Outlines>", "<Outlines>no</Outlines>"]
)
def test_a_block_without_outlines_is_text_and_the_model_goes_on(text: str) -> None:
    played = play(text, " more")
    assert [len(stage) for stage in played.stages] == [1, 1]
    assert played.run.text == text + " more"
    assert plain(played.stages[1][0].prompt) == text


@pytest.mark.parametrize("text", ["no tags", "<Outlines><Outline> 1: a", "<Parallel>"])
def test_an_unclosed_block_is_served_as_it_is(text: str) -> None:
    played = play(text)
    assert [len(stage) for stage in played.stages] == [1]
    assert played.run.text == text


def test_tags_inside_a_thread_are_text() -> None:
    played = play(OPENED, OPENED + "</Thread>", "b</Thread>", "end")
    assert [len(stage) for stage in played.stages] == [1, 2, 1]
    assert f"1:{OPENED}</Thread><Thread>" in played.run.text


def test_one_outline_is_one_thread() -> None:
    played = play("<Outlines><Outline> 1: a</Outlines>", "x</Thread>", "end")
    assert [len(stage) for stage in played.stages] == [1, 1, 1]
    assert played.run.text.endswith("</Outlines>\n<Thread>\n1:x</Thread>\nend")


def test_after_32_stages_nothing_forks_any_more() -> None:
    played = play(*["</Outlines>"] * 40)
    assert len(played.stages) == 33
    assert played.stages[-1][0].stop == ()


def test_a_cut_thread_is_closed_and_the_answer_says_why_it_ends() -> None:
    played = play(OPENED, "x" * 90, "y</Thread>", bound=len(OPENED) + 20)
    assert f"1:{'x' * 20}\n</Thread><Thread>" in played.run.text
    assert played.run.finish_reason == {"type": "length", "length": len(OPENED) + 20}


# -- any text of a model, in any chunks

TAGS = ("<Parallel>", "<Outlines>", "</Outlines>", "<Thread>", "</Thread>", OUTLINES)
WORDS = (*TAGS, "<Outline> 1: a", "<Outline> 2: b</Outline>", "<Outline>3:", "x ", "\n")
texts = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
bounds = st.none() | st.integers(1, 400)


def chunks_of(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def as_a_client(prompt: str, scripts: list[str], bound: int | None) -> str:
    """The published client in a few lines of text handling; returns the answer."""
    said, left, answer = iter(scripts), bound, ""

    def generate(stop: tuple[str, ...]) -> tuple[str, bool, int]:
        text, ids, reason = until_stop(next(said, ""), stop, left)
        return text, reason.get("matched") in stop, len(ids)

    def spend(tokens: int) -> bool:
        nonlocal left
        left = None if left is None else max(0, left - tokens)
        return left != 0

    for _ in range(32):
        text, stopped, tokens = generate(("</Outlines>",))
        answer += text
        more = spend(tokens)
        if not stopped or not more:
            return answer
        block = re.search(
            r"<Outlines>((?:(?!<Outlines>).)*)</Outlines>$", prompt + answer, re.S
        )
        body = block[1] if block else ""
        labels = list(dict.fromkeys(re.findall(r"<Outline>\s*([\d.]*\d)\s*:", body)))
        if not labels or "</Outlines>" in body or "</Thread>" in body:
            continue
        longest = 0
        for number, label in enumerate(labels):
            text, stopped, tokens = generate(("</Thread>",))
            answer += ("" if number else "\n") + f"<Thread>\n{label}:" + text
            answer += "" if stopped else "\n</Thread>"
            longest = max(longest, tokens)
        if not spend(longest):
            return answer
        answer += "\n"
    return answer + generate(())[0]


@given(texts, st.lists(texts, max_size=12), bounds, st.randoms(use_true_random=False))
def test_any_chunks_in_any_order_give_what_a_client_would_get(
    prompt: str, scripts: list[str], bound: int | None, rng: random.Random
) -> None:
    played = Played(
        ThreadWeaver(),
        prompt,
        scripts,
        bound,
        chunks=lambda text: chunks_of(rng, text),
        choose=rng.choice,
    )
    assert played.run.text == as_a_client(prompt, scripts, bound)
    assert plain(played.run.pieces) == played.run.text
    assert played.run.finish_reason is not None


@given(st.lists(texts, max_size=12), st.randoms(use_true_random=False))
def test_what_has_been_shown_is_never_taken_back(
    scripts: list[str], rng: random.Random
) -> None:
    played = Played(
        ThreadWeaver(),
        "Q",
        scripts,
        chunks=lambda text: chunks_of(rng, text),
        choose=rng.choice,
    )
    for before, after in zip(played.texts, played.texts[1:], strict=False):
        assert after.startswith(before)
