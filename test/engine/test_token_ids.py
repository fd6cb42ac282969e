"""The hooks that let token ids travel, around a tokenizer manager that records."""

from __future__ import annotations

import asyncio
import copy
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import BatchStrOutput, GenerateReqInput

from sglang_taper.engine import token_ids


class Letters:
    """A tokenizer: one id per character, its code point; 0 ends a sequence."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(i % 1000) for i in ids)


class Manager:
    """Stands for the tokenizer manager; keeps what SGLang would be asked."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or Letters()
        self.rid_to_state: dict[str, Any] = {}
        self.seen: list[Any] = []

    async def tokenize(self, obj: Any) -> Any:
        self.seen.append(obj)
        ids = obj.input_ids
        if ids is None and isinstance(obj.text, str):
            ids = [ord(c) for c in obj.text]
        return SimpleNamespace(input_ids=array("q", ids or ()))


def request(text: Any, group: Any = "g", **kwargs: Any) -> Any:
    meta = {"group": group} if group else {}
    meta |= kwargs.pop("meta", {})
    params = {"custom_params": {"taper": meta}} if meta else {}
    return GenerateReqInput(text=text, sampling_params=params, rid="r", **kwargs)


def ids_for(manager: Manager, obj: Any) -> list[int]:
    """What SGLang would send for `obj`."""

    async def original(manager: Manager, obj: Any) -> Any:
        return await manager.tokenize(obj)

    hook = token_ids.tokenize_hook(original, manager, obj)
    return list(asyncio.run(hook).input_ids)


def answered(
    manager: Manager, obj: Any, text: str, ids: list[int], **kwargs: Any
) -> None:
    """`obj` is sent; its answer comes in two parts, the second one finished."""
    ids_for(manager, obj)
    rid = kwargs.get("rid", "r1")
    half = len(text) // 2
    state = SimpleNamespace(
        obj=copy.copy(obj), output_ids=ids[:half], get_text=lambda: text[:half]
    )
    manager.rid_to_state[rid] = state
    finished = kwargs.get("finished", {"type": "length"})
    token_ids.remember_finished_hook(
        manager, output(rid, text[half:], ids[half:], finished)
    )


def output(rid: str, text: str, ids: list[int], finished: Any) -> Any:
    names = [field.name for field in msgspec.structs.fields(BatchStrOutput)]
    known = {"rids": [rid], "finished_reasons": [finished]}
    known |= {"output_strs": [text], "output_ids": [ids]}
    return BatchStrOutput(**{name: known.get(name) for name in names})


ODD = [1000 + ord(c) for c in " ab"]  # decode to " ab", are not what encode gives


def test_a_text_that_goes_on_from_an_answer_gets_its_ids() -> None:
    manager = Manager()
    answered(manager, request("ask:"), " ab", [*ODD, 0])
    child = request("ask: ab!")
    assert ids_for(manager, child) == [*map(ord, "ask:"), *ODD, ord("!")]
    assert child.input_ids is None
    assert manager.seen[-1].text == "ask: ab!"


def test_ids_travel_on_to_the_children_of_a_child() -> None:
    manager = Manager()
    answered(manager, request("ask:"), " ab", ODD)
    answered(manager, request("ask: ab!"), " ab", ODD, rid="r2")
    ids = ids_for(manager, request("ask: ab! ab?"))
    assert ids == [*map(ord, "ask:"), *ODD, ord("!"), *ODD, ord("?")]


def test_the_parent_named_by_the_child_wins_between_equal_texts() -> None:
    manager = Manager()
    for rid, tail in [("r1", 1000), ("r2", 2000)]:
        answered(manager, request("ask:"), "a", [tail + ord("a")], rid=rid)
    for rid, tail in [("r1", 1000), ("r2", 2000)]:
        ids = ids_for(manager, request("ask:a", meta={"parent": rid}))
        assert ids[-1] == tail + ord("a")


@pytest.mark.parametrize(
    "obj",
    [
        request("ask: ab!", group="other"),
        request("ask: ab!", group=None),
        request("ask: ab!", group=None, meta={"tpot_slo_ms": 5}),
        request("ask: a!"),
        request("ask: ab!", image_data=["x.png"]),
        request("ask: ab!", session_params={"id": "s"}),
        request(None, input_ids=[7, 8]),
        request(None, input_embeds=[[0.5]]),
        SimpleNamespace(text="ask: ab!", input_ids=None, sampling_params={}),
    ],
    ids=[
        *("other group", "no group", "targets only", "other text", "image"),
        *("session", "ids", "embeddings", "no generation"),
    ],
)
def test_other_requests_are_tokenised_by_sglang(obj: Any) -> None:
    manager = Manager()
    answered(manager, request("ask:"), " ab", ODD)
    ids_for(manager, obj)
    assert manager.seen[-1] is obj


@pytest.mark.parametrize(
    "params",
    [None, 3, {"custom_params": 3}, {"custom_params": {"taper": {"group": 3}}}],
)
def test_odd_parameters_are_left_to_sglang(params: Any) -> None:
    manager = Manager()
    obj = GenerateReqInput(text="ask: ab!", sampling_params=params)
    ids_for(manager, obj)
    assert manager.seen == [obj]


def test_what_is_not_finished_is_not_remembered() -> None:
    manager = Manager()
    answered(manager, request("ask:"), " ab", ODD, finished=None)
    assert ids_for(manager, request("ask: ab!")) == [*map(ord, "ask: ab!")]


def test_an_answer_nobody_waits_for_is_passed_over() -> None:
    manager = Manager()
    token_ids.remember_finished_hook(manager, output("gone", "a", [1], {"type": "x"}))
    token_ids.remember_finished_hook(manager, SimpleNamespace(rids=["embedding"]))
    assert not hasattr(manager, "taper_token_memory")


def test_a_tokenizer_that_fails_leaves_the_request_to_sglang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Strict(Letters):
        def encode(self, text: str) -> list[int]:  # type: ignore[override]
            return super().encode(text)

    manager = Manager(Strict())
    answered(manager, request("ask:"), " ab", ODD)
    child = request("ask: ab!")
    ids_for(manager, child)
    assert manager.seen[-1] is child
    assert "request r is tokenised anew" in caplog.text


def test_without_a_tokenizer_sglang_answers() -> None:
    manager = Manager()
    answered(manager, request("ask:"), " ab", ODD)
    manager.tokenizer = None
    child = request("ask: ab!")
    ids_for(manager, child)
    assert manager.seen[-1] is child


def test_items_of_a_batch_are_remembered_singly() -> None:
    manager = Manager()
    batch = GenerateReqInput(
        text=["one:", "two:"],
        sampling_params={"custom_params": {"taper": {"group": "g"}}},
    )
    batch.normalize_batch_and_arguments()
    answered(manager, batch[1], " ab", ODD)
    assert ids_for(manager, request("two: ab")) == [*map(ord, "two:"), *ODD]
    assert ids_for(manager, request("one: ab")) == [*map(ord, "one: ab")]
