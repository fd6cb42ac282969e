"""What is remembered of finished branches, and whose ids a text continues."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_taper import models
from sglang_taper.engine import token_memory
from sglang_taper.engine.token_memory import FinishedBranch, TokenMemory

PROMPT = "The harbour town lies between two hills. A list:"
EMOJI = "\N{GRINNING FACE}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models.ensure_smollm2(progress=False))


@pytest.fixture(scope="module")
def spacing_tokenizer() -> Any:
    """Puts a space before whatever it encodes, as SentencePiece models do."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    letters = "▁abcdefghijklmnopqrstuvwxyz.1:"
    plain = Tokenizer(Unigram([("<unk>", 0.0), *((c, -1.0) for c in letters)], 0))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    plain.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def singly(tokenizer: Any, text: str) -> list[int]:
    """Ids of the characters of `text` one by one: no tokenizer would choose them."""
    return [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]


def branch(tokenizer: Any, said: list[int], answer: str, **kwargs: Any) -> Any:
    prompt = kwargs.pop("prompt", PROMPT)
    asked = tokenizer.encode(prompt)
    return FinishedBranch(kwargs.pop("rid", "r"), prompt, answer, asked, said)


def continued(tokenizer: Any, finished: FinishedBranch, text: str) -> Any:
    return token_memory.continued_ids(finished, text, *token_memory.coder(tokenizer))


def test_a_child_gets_the_ids_that_were_generated(tokenizer: Any) -> None:
    said = singly(tokenizer, " hello hello")
    assert said != tokenizer.encode(" hello hello")
    finished = branch(tokenizer, said, " hello hello")
    ids = continued(tokenizer, finished, PROMPT + " hello hello\n2.")
    assert ids == tokenizer.encode(PROMPT) + said + tokenizer.encode("\n2.")


def test_the_text_itself_gets_its_ids_and_nothing_more(tokenizer: Any) -> None:
    said = singly(tokenizer, " hello")
    finished = branch(tokenizer, said, " hello")
    ids = continued(tokenizer, finished, PROMPT + " hello")
    assert ids == [*finished.prompt_ids, *said]


@pytest.mark.parametrize("num_ends", [1, 3])
def test_end_of_sequence_ids_are_left_out(tokenizer: Any, num_ends: int) -> None:
    said = singly(tokenizer, " bye")
    end = [tokenizer.eos_token_id] * num_ends
    finished = branch(tokenizer, said + end, " bye")
    ids = continued(tokenizer, finished, PROMPT + " bye. Then")
    assert ids == [*finished.prompt_ids, *said, *tokenizer.encode(". Then")]


def test_an_end_of_sequence_that_the_program_writes_is_kept(tokenizer: Any) -> None:
    said = [*singly(tokenizer, " bye"), tokenizer.eos_token_id]
    finished = branch(tokenizer, said, " bye")
    text = PROMPT + " bye" + tokenizer.eos_token + "\nNext"
    ids = continued(tokenizer, finished, text)
    assert ids == [*finished.prompt_ids, *said, *tokenizer.encode("\nNext")]


def test_ids_of_a_trimmed_stop_string_are_left_out(tokenizer: Any) -> None:
    said = singly(tokenizer, " one\nEND")
    finished = branch(tokenizer, said, " one\n")
    ids = continued(tokenizer, finished, PROMPT + " one\n" + "Then")
    kept = singly(tokenizer, " one\n")
    assert ids == [*finished.prompt_ids, *kept, *tokenizer.encode("Then")]


def test_an_id_that_a_stop_string_has_cut_is_encoded_anew(tokenizer: Any) -> None:
    (cut,) = tokenizer.encode("hello")
    said = [*singly(tokenizer, " a b "), cut]
    finished = branch(tokenizer, said, " a b hel")  # the stop string was "lo"
    ids = continued(tokenizer, finished, PROMPT + " a b hel!")
    kept = singly(tokenizer, " a b ")
    assert ids == [*finished.prompt_ids, *kept, *tokenizer.encode("hel!")]


def test_ids_are_kept_up_to_a_special_token_that_the_answer_hides(
    tokenizer: Any,
) -> None:
    hidden = [tokenizer.eos_token_id]
    said = singly(tokenizer, " left") + hidden + singly(tokenizer, " right" * 20)
    answer = " left" + " right" * 20
    finished = branch(tokenizer, said, answer)
    ids = continued(tokenizer, finished, PROMPT + answer + ".")
    kept = [*finished.prompt_ids, *singly(tokenizer, " left")]
    assert ids == kept + tokenizer.encode(" right" * 20 + ".")


def test_a_character_of_several_ids_stays_whole(tokenizer: Any) -> None:
    said = singly(tokenizer, " " + EMOJI * 2)
    assert len(said) > 5
    finished = branch(tokenizer, said, " " + EMOJI * 2)
    ids = continued(tokenizer, finished, PROMPT + " " + EMOJI * 2 + "!")
    assert ids == [*finished.prompt_ids, *said, *tokenizer.encode("!")]


def test_an_unfinished_character_that_the_text_completes_is_encoded_anew(
    tokenizer: Any,
) -> None:
    said = tokenizer.encode(" so" + EMOJI)[:-1]
    finished = branch(tokenizer, said, " so")
    ids = continued(tokenizer, finished, PROMPT + " so" + EMOJI)
    assert ids == [*finished.prompt_ids, *tokenizer.encode(" so" + EMOJI)]
    assert tokenizer.decode(ids) == PROMPT + " so" + EMOJI


def test_nothing_travels_when_no_generated_id_is_kept(tokenizer: Any) -> None:
    (cut,) = tokenizer.encode("hello")
    finished = branch(tokenizer, [cut], "hel")
    assert continued(tokenizer, finished, PROMPT + "hel!") is None


def test_a_tokenizer_that_adds_spaces_is_asked_for_the_whole_text(
    spacing_tokenizer: Any,
) -> None:
    said = singly(spacing_tokenizer, "x")[1:]  # without the space before
    finished = branch(spacing_tokenizer, said, "x", prompt="a list:")
    assert continued(spacing_tokenizer, finished, "a list:x") is not None
    assert continued(spacing_tokenizer, finished, "a list:x.1") is None


def test_the_longest_text_wins() -> None:
    short = FinishedBranch("s", "ask", " a", [1], [2])
    long = FinishedBranch("l", "ask a", " b", [1, 2], [3])
    other = FinishedBranch("o", "ask", " c and much more", [1], [4])
    for branches in ([short, long, other], [other, long, short]):
        found = token_memory.longest_match(branches, "ask a b c", parent="s")
        assert found is long
    assert token_memory.longest_match([other], "ask a b c", None) is None


def test_between_equal_texts_the_named_parent_wins_and_else_the_newest() -> None:
    twins = [FinishedBranch(rid, "ask", " a", [1], [i]) for i, rid in enumerate("xyz")]
    for parent, rid in [("x", "x"), ("y", "y"), ("w", "z"), (None, "z")]:
        found = token_memory.longest_match(twins, "ask a b", parent)
        assert found is not None
        assert found.rid == rid


def test_a_text_that_has_not_all_of_the_answer_is_no_continuation() -> None:
    said = FinishedBranch("r", "ask", " a b", [1], [2, 3])
    assert token_memory.longest_match([said], "ask a c", None) is None
    assert token_memory.longest_match([said], "ask a ", None) is None


# -- the memory

ONE = FinishedBranch("one", "p", "q", [1, 2], [3])


def numbered(i: int, num_tokens: int = 2) -> FinishedBranch:
    return FinishedBranch(f"r{i}", f"p{i}:", "a", [0] * (num_tokens - 1), [1])


def test_what_one_group_said_is_unknown_to_another() -> None:
    memory = TokenMemory()
    memory.remember("g", ONE, 0)
    assert memory.recall("g", "pq and on", None, 1) is ONE
    assert memory.recall("h", "pq and on", None, 1) is None


def test_a_branch_that_said_nothing_gives_its_ids_to_no_text() -> None:
    memory = TokenMemory()
    memory.remember("g", ONE._replace(answer=""), 0)
    assert memory.recall("g", "pq", None, 0) is None
    assert memory.find(ONE.rid, 0) is not None


def test_a_request_that_comes_again_replaces_itself() -> None:
    memory = TokenMemory()
    memory.remember("g", ONE, 0)
    memory.remember("g", ONE._replace(output_ids=[4, 5]), 0)
    found = memory.recall("g", "pq", None, 0)
    assert found is not None
    assert (found.output_ids, memory.num_tokens) == ([4, 5], 4)


def test_a_group_is_forgotten_when_it_was_not_used_for_the_ttl() -> None:
    memory = TokenMemory(ttl_ms=100)
    memory.remember("g", ONE, 0)
    assert memory.recall("g", "pq", None, 100) is ONE
    assert memory.recall("g", "pq", None, 200) is ONE
    assert memory.recall("g", "pq", None, 301) is None
    assert len(memory) == memory.num_tokens == 0


def test_the_group_unused_for_longest_makes_room() -> None:
    memory = TokenMemory(max_groups=2)
    for i, group in enumerate("ab"):
        memory.remember(group, ONE, i)
    memory.recall("a", "pq", None, 2)
    memory.remember("c", ONE, 3)
    known = [g for g in "abc" if memory.recall(g, "pq", None, 4)]
    assert (known, memory.num_tokens) == (["a", "c"], 6)


def test_the_branch_unused_for_longest_makes_room_in_its_group() -> None:
    memory = TokenMemory(max_branches=2)
    for i in range(2):
        memory.remember("g", numbered(i), i)
    memory.recall("g", "p0:a", None, 2)
    memory.remember("g", numbered(2), 3)
    known = [i for i in range(3) if memory.recall("g", f"p{i}:a", None, 4)]
    assert (known, memory.num_tokens) == ([0, 2], 4)


def test_the_ids_held_altogether_are_bounded() -> None:
    memory = TokenMemory(max_tokens=10)
    for i in range(6):
        memory.remember(f"g{i % 3}", numbered(i, 4), i)
        assert memory.num_tokens <= 10
    assert memory.recall("g2", "p5:a", None, 6) is not None
    assert memory.recall("g0", "p0:a", None, 6) is None
    memory.remember("g5", numbered(7, 11), 7)
    assert memory.recall("g5", "p7:a", None, 7) is None
    assert memory.recall("g2", "p5:a", None, 7) is not None


def test_a_request_is_found_by_its_id_until_it_is_forgotten() -> None:
    memory = TokenMemory(max_groups=1, ttl_ms=100)
    memory.remember("g", ONE, 0)
    assert memory.find(ONE.rid, 100) is ONE
    assert memory.find(ONE.rid, 201) is None
    memory.remember("g", ONE, 300)
    memory.remember("h", numbered(1), 301)
    assert memory.find(ONE.rid, 302) is None
    assert memory.find("r1", 302) is not None


def test_a_request_sent_as_ids_is_found_by_its_id_and_continues_no_text() -> None:
    memory = TokenMemory()
    sent = ONE._replace(prompt=None)
    memory.remember("g", sent, 0)
    assert memory.find(ONE.rid, 1) is sent
    assert memory.recall("g", "pq", None, 1) is None
