"""Children that send generated text share the very tokens of their parent."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from workload import STORY

from server import Server
from sglang_taper import models

SUFFIX = "\nAnd then"
PARENT_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models.ensure_smollm2(progress=False))


@pytest.fixture(autouse=True)
def _policy_eager(taper_server: Server) -> None:
    taper_server.set_policy(policy="eager")
    taper_server.flush()


class Program:
    """One group on a server; every request is greedy and brings its prompt's ids."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.group = uuid.uuid4().hex

    def body(self, text: Any, meta: Any = None, **sampling: Any) -> dict[str, Any]:
        limits = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        custom = {"taper": {"group": self.group, **(meta or {})}}
        params = {**limits, **sampling, "custom_params": custom}
        return {
            "text": text,
            "sampling_params": params,
            "return_prompt_token_ids": True,
        }

    def ask(self, text: Any, meta: Any = None, **sampling: Any) -> Any:
        return self.server.generate(self.body(text, meta, **sampling))


@pytest.fixture
def program(taper_server: Server) -> Program:
    return Program(taper_server)


def ids_of(answer: dict[str, Any]) -> list[int]:
    """Prompt and output of an answer."""
    return [*answer["prompt_token_ids"], *answer["output_ids"]]


def assert_continues(child: dict[str, Any], known: list[int]) -> None:
    """`child` begins with `known`; all of it but the token sampled last was cached."""
    assert child["prompt_token_ids"][: len(known)] == known
    assert child["meta_info"]["cached_tokens"] >= len(known) - 1
    assert child["meta_info"]["taper"]["prefix_tokens_shared"] >= len(known) - 1


def split_letters(tokenizer: Any) -> dict[str, Any]:
    """Sampling that says `l` again and again, each as a token of its own."""
    (letter,) = tokenizer.encode("l")
    return {"logit_bias": {str(letter): 100.0}, "max_new_tokens": PARENT_TOKENS}


def test_a_child_shares_all_that_its_parent_generated(
    program: Program, tokenizer: Any
) -> None:
    parent = program.ask(STORY, max_new_tokens=PARENT_TOKENS)
    child = program.ask(STORY + parent["text"] + SUFFIX)
    assert_continues(child, ids_of(parent))
    assert child["prompt_token_ids"] == ids_of(parent) + tokenizer.encode(SUFFIX)


def test_so_it_does_where_the_text_has_other_ids(
    program: Program, tokenizer: Any
) -> None:
    parent = program.ask(STORY, **split_letters(tokenizer))
    assert parent["text"] == "l" * PARENT_TOKENS
    text = STORY + parent["text"] + SUFFIX
    assert tokenizer.encode(text)[: len(ids_of(parent))] != ids_of(parent)
    assert_continues(program.ask(text), ids_of(parent))
    alone = Program(program.server).ask(text)
    assert alone["prompt_token_ids"] == tokenizer.encode(text)


def test_a_child_says_what_it_would_say_to_its_parents_ids(
    program: Program, tokenizer: Any
) -> None:
    parent = program.ask(STORY, **split_letters(tokenizer))
    child = program.ask(STORY + parent["text"] + SUFFIX, max_new_tokens=12)
    body = program.body(None, max_new_tokens=12)
    body["input_ids"] = ids_of(parent) + tokenizer.encode(SUFFIX)
    assert program.server.generate(body)["output_ids"] == child["output_ids"]


def test_ids_of_a_trimmed_stop_string_do_not_travel(
    program: Program, tokenizer: Any
) -> None:
    free = Program(program.server).ask(STORY, max_new_tokens=PARENT_TOKENS)
    whole = [tokenizer.decode([i]) for i in free["output_ids"]]
    cut = next(n for n, word in enumerate(whole) if n > 3 and len(word) > 3)
    # The stop string is the second half of a token.
    stop = whole[cut][2:]
    stopped = program.ask(STORY, max_new_tokens=PARENT_TOKENS, stop=stop)
    assert stopped["text"] == "".join(whole[:cut]) + whole[cut][:2]
    assert stopped["output_ids"] == free["output_ids"][: cut + 1]
    child = program.ask(STORY + stopped["text"] + "!")
    kept = [*stopped["prompt_token_ids"], *stopped["output_ids"][:cut]]
    assert_continues(child, kept)
    assert child["prompt_token_ids"] == kept + tokenizer.encode(whole[cut][:2] + "!")


def test_a_stop_string_that_the_program_repeats_keeps_its_ids(
    program: Program, tokenizer: Any
) -> None:
    free = program.ask(STORY, max_new_tokens=PARENT_TOKENS)
    words = [tokenizer.decode([i]) for i in free["output_ids"]]
    stop = "".join(words[6:8])
    own = Program(program.server)
    parent = own.ask(STORY, max_new_tokens=PARENT_TOKENS, stop=stop)
    assert parent["text"] == free["text"].partition(stop)[0]
    child = own.ask(STORY + parent["text"] + stop + SUFFIX)
    assert_continues(child, ids_of(parent))


def test_ids_travel_through_generations(program: Program, tokenizer: Any) -> None:
    text, known = STORY, tokenizer.encode(STORY)
    for depth in range(4):
        answer = program.ask(text, {"depth": depth}, **split_letters(tokenizer))
        assert answer["prompt_token_ids"] == known
        text += answer["text"] + SUFFIX
        known = ids_of(answer) + tokenizer.encode(SUFFIX)
    assert len(tokenizer.encode(text)) < len(known)


def test_each_sample_of_a_fork_can_be_continued(
    program: Program, tokenizer: Any
) -> None:
    # Sampled under a grammar, the same text comes in tokens of all lengths.
    samples = program.ask(STORY, n=2, temperature=1.0, regex="l{40}", max_new_tokens=64)
    assert {sample["text"] for sample in samples} == {"l" * 40}
    assert samples[0]["output_ids"] != samples[1]["output_ids"]
    for sample in samples:
        parent = sample["meta_info"]["id"]
        child = program.ask(STORY + sample["text"] + SUFFIX, {"parent": parent})
        # What ended the text comes after it: an end of sequence, and more.
        said = [i for i in sample["output_ids"] if "l" in tokenizer.decode([i])]
        assert tokenizer.decode(said) == sample["text"]
        assert_continues(child, sample["prompt_token_ids"] + said)


def test_a_streamed_answer_can_be_continued(program: Program, tokenizer: Any) -> None:
    body = program.body(STORY, **split_letters(tokenizer)) | {"stream": True}
    answer = program.server.post("/generate", body, stream=True)
    lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
    parent = json.loads(lines[-1])
    assert parent["text"] == "l" * PARENT_TOKENS
    child = program.ask(STORY + parent["text"] + SUFFIX)
    assert_continues(child, ids_of(parent))


def test_a_batch_continues_the_same_answer_in_two_ways(
    program: Program, tokenizer: Any
) -> None:
    parent = program.ask(STORY, **split_letters(tokenizer))
    suffixes = [SUFFIX, " or else"]
    texts = [STORY + parent["text"] + suffix for suffix in suffixes]
    for child, suffix in zip(program.ask(texts), suffixes, strict=True):
        assert_continues(child, ids_of(parent))
        ids = ids_of(parent) + tokenizer.encode(suffix)
        assert child["prompt_token_ids"] == ids


def test_ids_travel_on_the_openai_route(program: Program, tokenizer: Any) -> None:
    parent = program.ask(STORY, **split_letters(tokenizer))
    text = STORY + parent["text"] + SUFFIX
    body = {"model": "smollm2", "prompt": text, "max_tokens": 2, "temperature": 0}
    body["custom_params"] = {"taper": {"group": program.group}}
    answer = program.server.post("/v1/completions", body).json()
    (meta,) = answer["metadata"]["taper"]
    assert meta["prefix_tokens_shared"] >= len(ids_of(parent)) - 1
    assert answer["usage"]["prompt_tokens"] > len(tokenizer.encode(text))


def test_what_a_program_wrote_itself_is_tokenised_as_ever(
    program: Program, tokenizer: Any
) -> None:
    program.ask(STORY + " l", max_new_tokens=0)
    program.ask(STORY + " l", max_new_tokens=4)
    text = STORY + " lllllll"
    assert program.ask(text)["prompt_token_ids"] == tokenizer.encode(text)
