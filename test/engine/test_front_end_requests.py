"""Requests for front ends: who asks for one, what is refused, and their parts."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_taper.engine import front_end_driver as driver
from sglang_taper.engine import front_end_requests as requests
from sglang_taper.errors import FieldError, FrontEndError
from sglang_taper.front_ends import registry
from sglang_taper.front_ends.types import Part
from sglang_taper.protocol import MAX_DEPTH, BranchMeta

HEADERS = {"x-taper-front-end": "threadweaver"}


def request(
    meta: dict[str, Any] | None = None, text: Any = "Q", **changes: Any
) -> GenerateReqInput:
    params = changes.pop("sampling_params", {})
    if meta is not None:
        params = {**params, "custom_params": {"taper": meta}}
    return GenerateReqInput(text=text, sampling_params=params, **changes)


def test_the_body_names_a_front_end_and_wins_over_the_header() -> None:
    assert requests.front_end_of(request(), None) is None
    assert requests.front_end_of(request(), HEADERS) == "threadweaver"
    assert requests.front_end_of(request({"front_end": "mine"}), HEADERS) == "mine"
    assert requests.front_end_of(object(), HEADERS) is None


def test_a_request_of_a_part_is_no_request_for_a_front_end() -> None:
    obj = request({"front_end": "threadweaver"})
    part = requests.part_request(obj, Part(), [1], BranchMeta(group="g"), 5, 0)
    assert requests.front_end_of(part, HEADERS) is None


@pytest.mark.parametrize(
    ("obj", "complaint"),
    [
        (request(text=["a", "b"]), "one prompt per request"),
        (request(text=None, input_ids=[[1], [2]]), "one prompt per request"),
        (request(sampling_params=[{}]), "one prompt per request"),
        (request(sampling_params={"n": 2}), "n=2 is not valid: 1 with front end"),
        (request(sampling_params={"ebnf": "r"}), "ebnf='r' is not valid: not with"),
        (request(return_logprob=True), "return_logprob=True is not valid"),
        (request(image_data="x"), "image_data='x' is not valid"),
        (request({"depth": MAX_DEPTH, "group": "g"}), "taper.depth=64 is not valid"),
        (request({"group": "a b"}), "taper.group='a b' is not valid"),
    ],
)
def test_what_a_front_end_can_not_have_is_named(obj: Any, complaint: str) -> None:
    with pytest.raises(FieldError, match=complaint.replace("[", r"\[")):
        requests.check_front_end(obj, HEADERS)


def test_without_a_front_end_nothing_is_refused() -> None:
    requests.check_front_end(request(text=["a"], return_logprob=True), {})


def test_serial_parts_are_the_request_and_the_others_its_branches() -> None:
    base = BranchMeta(group="g", branch=1, width=2, depth=1, stage=3, parent="p")
    (serial,) = requests.part_metas(base, 1, 0, None)
    assert serial == base
    first, second = requests.part_metas(base, 2, 1, "last")
    assert first == BranchMeta("g", 0, 2, "last", 2, 4)
    assert second.branch == 1
    (after,) = requests.part_metas(base, 1, 1, "last")
    assert (after.stage, after.parent, after.branch) == (4, "p", 1)


def test_a_part_goes_over_the_parameters_of_the_request() -> None:
    given = {"temperature": 0.5, "stop": "U", "sampling_seed": 7, "top_p": 0.9}
    obj = request({"front_end": "threadweaver"}, sampling_params=given)
    part = Part(stop=("S",), sampling_params={"top_p": 0.1})
    made = requests.part_request(obj, part, [1, 2], BranchMeta(group="g"), 5, 0)
    assert (made.text, made.input_ids) == (None, [1, 2])
    params = made.sampling_params
    assert params["stop"] == ["S", "U"]
    assert params["top_p"] == 0.1
    assert params["max_new_tokens"] == 5
    assert params["sampling_seed"] == 7
    assert params["custom_params"]["taper"]["group"] == "g"
    other = requests.part_request(obj, part, [1], BranchMeta(group="g"), 5, 1)
    assert other.sampling_params["sampling_seed"] != 7
    assert other.rid != made.rid
    assert obj.sampling_params["stop"] == "U"


def test_the_bound_is_what_sglang_would_take() -> None:
    assert requests.bound_of({}, None) == 128
    assert requests.bound_of({}, {"max_new_tokens": 9}) == 9
    assert requests.bound_of({"max_new_tokens": None}, {"max_new_tokens": 9}) is None


# -- the driver, on an engine that repeats what it is told in single characters


class Characters:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*map(ord, text)]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


class Repeating:
    """A manager as far as needed: every part says `said`, a character at a time."""

    tokenizer = Characters()
    preferred_sampling_params = None

    def __init__(self, said: str, incremental: bool = False) -> None:
        self._said, self.incremental_streaming_output = said, incremental
        self.rid_to_state: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.rng = random.Random(1)

    def auto_create_handle_loop(self) -> None:
        pass

    async def _tokenize_texts(self, text: str) -> tuple[list[int], None]:
        return [*map(ord, text)], None

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    async def generate_request(self, obj: Any, request: Any) -> Any:
        self.rid_to_state[obj.rid] = obj
        text = ""
        for i, char in enumerate(self._said):
            await asyncio.sleep(0.001 * self.rng.random())
            text += char
            is_last = i + 1 == len(self._said)
            shown = char if self.incremental_streaming_output else text
            if obj.stream or is_last:
                yield self._out(obj, shown, i + 1, is_last)
        del self.rid_to_state[obj.rid]

    def _out(self, obj: Any, text: str, num_tokens: int, is_last: bool) -> Any:
        reason = {"type": "stop", "matched": None} if is_last else None
        info = {"finish_reason": reason, "completion_tokens": num_tokens}
        ids = [*map(ord, text)]
        return {"text": text, "output_ids": ids, "meta_info": info}


class Fork:
    def run(self, prompt: Any) -> Any:
        yield [Part(lead="<1>"), Part(lead="<2>")]
        yield [Part()]


@pytest.fixture
def _fork(monkeypatch: pytest.MonkeyPatch) -> None:
    factories = {**registry._factories, "fork": Fork}
    monkeypatch.setattr(registry, "_factories", factories)


def answers(manager: Repeating, stream: bool) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        obj = request({"front_end": "fork"}, stream=stream)
        return [a async for a in driver.generate_request_hook(None, manager, obj)]  # type: ignore[arg-type]

    return asyncio.run(collect())


@pytest.mark.usefixtures("_fork")
@pytest.mark.parametrize("incremental", [False, True])
def test_streams_are_cumulative_or_incremental_as_the_server_is(
    incremental: bool,
) -> None:
    whole = "<1>abc<2>abcabc"
    *events, last = answers(Repeating("abc", incremental), stream=True)
    assert len(events) == 9
    if incremental:
        assert "".join(a["text"] for a in (*events, last)) == whole
        ids = [i for a in (*events, last) for i in a["output_ids"]]
        assert ids == [*map(ord, whole)]
    else:
        assert last["text"] == whole
        assert all(whole.startswith(event["text"]) for event in events)
    assert last["meta_info"]["completion_tokens"] == 9


@pytest.mark.usefixtures("_fork")
def test_an_answer_that_is_not_streamed_comes_alone() -> None:
    (answer,) = answers(Repeating("abc"), stream=False)
    assert answer["text"] == "<1>abc<2>abcabc"
    parts = answer["meta_info"]["front_end"]["parts"]
    assert [p["width"] for p in parts] == [2, 2, 1]


@pytest.mark.usefixtures("_fork")
def test_leaving_a_stream_aborts_what_still_runs() -> None:
    manager = Repeating("abc" * 20)

    async def leave() -> None:
        obj = request({"front_end": "fork"}, stream=True, rid="r")
        stream = driver.generate_request_hook(None, manager, obj)  # type: ignore[arg-type]
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert len(manager.aborted) == 2
    assert manager.taper_programs == {}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_fork")
def test_the_rid_aborts_the_parts_and_other_aborts_are_left_alone() -> None:
    manager = Repeating("abc")
    served = SimpleNamespace(abort=lambda: manager.aborted.append("all of r"))
    manager.taper_programs = {"r": served}  # type: ignore[attr-defined]
    driver.abort_program_hook(manager, "other")
    driver.abort_program_hook(manager, "", abort_all=True)
    assert manager.aborted == []
    driver.abort_program_hook(manager, rid="r")
    assert manager.aborted == ["all of r"]


def test_a_part_that_fails_fails_the_request() -> None:
    class Failing(Repeating):
        async def generate_request(self, obj: Any, request: Any) -> Any:
            raise FrontEndError("x", "the part failed")
            yield

    async def run() -> None:
        obj = request({"front_end": "threadweaver"})
        await anext(driver.generate_request_hook(None, Failing("a"), obj))  # type: ignore[arg-type]

    with pytest.raises(FrontEndError, match="the part failed"):
        asyncio.run(run())


@pytest.mark.parametrize("status", [400, 503])
def test_a_part_that_the_scheduler_refuses_fails_the_request(status: int) -> None:
    reason = {"type": "abort", "status_code": status, "message": "no room"}
    with pytest.raises(Exception, match="no room"):
        driver._raise_if_refused(reason)
    driver._raise_if_refused({"type": "abort", "message": "by the client"})
