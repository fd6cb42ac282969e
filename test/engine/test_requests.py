"""Branch metadata on its way from the client to the scheduler and back."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.datastructures import Headers
from starlette.requests import Request

from sglang_taper.engine import requests
from sglang_taper.engine.front_end_driver import refuse_before_stream_hook
from sglang_taper.errors import FieldError
from sglang_taper.protocol import MAX_DEPTH, MAX_WIDTH, parse_branch_meta


def generate(sampling_params: Any = None, text: Any = "a", **kwargs: Any) -> Any:
    return GenerateReqInput(text=text, sampling_params=sampling_params, **kwargs)


def params(meta: Any, **others: Any) -> dict[str, Any]:
    return {**others, "custom_params": {"taper": meta}}


def normalised(obj: Any) -> Any:
    requests.prepare(obj)
    obj.normalize_batch_and_arguments()
    requests.assign_groups_hook(None, obj)
    return obj


def meta_of(sampling_params: Any) -> Any:
    return sampling_params["custom_params"]["taper"]


def wire(meta: dict[str, Any]) -> dict[str, Any]:
    """What of it a client may send too."""
    assert meta["called_ms"] > 0
    return {key: value for key, value in meta.items() if key != "called_ms"}


def sent(sampling_params: dict[str, Any], warm_up: bool = True) -> list[dict[str, Any]]:
    """Metadata of everything SGLang sends for one prompt of an n>1 call, in order."""
    shared = SamplingParams(**sampling_params)
    tokenized = []
    if warm_up:
        first = copy.copy(shared)
        first.max_new_tokens = 0
        tokenized.append(SimpleNamespace(sampling_params=first))
    tokenized += [SimpleNamespace(sampling_params=shared) for _ in range(shared.n)]
    for request in tokenized:
        requests.number_sibling_hook(None, request)
    return [t.sampling_params.custom_params["taper"] for t in tokenized]


@pytest.mark.parametrize(
    ("meta", "parts"),
    [
        ({"group": "g", "width": 0}, ["custom_params.taper.width=0", "1 to 4096"]),
        ({"group": "g", "branch": "1"}, ["custom_params.taper.branch='1'", "integer"]),
        ({"group": "a b"}, ["custom_params.taper.group='a b'", "128 characters"]),
        ({"group": "x" * 10_000}, ["custom_params.taper.group=", "128 characters"]),
        ({"group": {"deep": 1}}, ["custom_params.taper.group={'deep': 1}"]),
        ({"group": "g", "nested": {}}, ["custom_params.taper.nested={}", "known keys"]),
        ({"branch": 1}, ["custom_params.taper.group=None", "required"]),
        (["g"], ["custom_params.taper=['g']", "object"]),
        ({"tpot_slo_ms": float("nan")}, ["custom_params.taper.tpot_slo_ms=nan"]),
    ],
)
def test_bad_metadata_is_refused_with_field_value_and_range(
    meta: Any, parts: list[str]
) -> None:
    with pytest.raises(FieldError) as caught:
        requests.prepare(generate(params(meta)))
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 300
    for part in parts:
        assert part in str(caught.value)


def test_bad_metadata_in_a_batch_names_the_item() -> None:
    batch = [params({"group": "g"}), params({"group": "g", "depth": -1})]
    with pytest.raises(FieldError, match=r"sampling_params\[1\].*\.depth=-1"):
        requests.prepare(generate(batch, text=["a", "b"]))


@pytest.mark.parametrize("given", [None, {}, {"n": 1, "custom_params": None}])
def test_a_request_without_metadata_is_left_alone(given: Any) -> None:
    obj = generate(given)
    requests.prepare(obj)
    assert obj.sampling_params is given


def test_other_custom_params_survive_and_the_callers_objects_are_not_written() -> None:
    given = params({"group": "g", "branch": 1, "width": 2}, temperature=0)
    given["custom_params"]["thinking_budget"] = 7
    before = copy.deepcopy(given)
    obj = normalised(generate(given))
    custom = obj.sampling_params["custom_params"]
    assert custom == before["custom_params"]
    assert obj.sampling_params["temperature"] == 0
    custom["taper"]["group"] = "changed"
    assert given == before


def test_slo_headers_become_metadata_without_a_group() -> None:
    obj = generate()
    requests.prepare(obj, Headers({"X-SLO-TTFT-ms": "300", "x-slo-tpot-ms": "12.5"}))
    assert meta_of(obj.sampling_params) == {"ttft_slo_ms": 300.0, "tpot_slo_ms": 12.5}


def test_slos_in_the_body_win_over_the_headers() -> None:
    headers = Headers({"x-slo-ttft-ms": "300", "x-slo-tpot-ms": "12.5"})
    obj = generate([params({"tpot_slo_ms": 40}), {}], text=["a", "b"])
    requests.prepare(obj, headers)
    first, second = (meta_of(p) for p in obj.sampling_params)
    assert first == {"ttft_slo_ms": 300.0, "tpot_slo_ms": 40.0}
    assert second == {"ttft_slo_ms": 300.0, "tpot_slo_ms": 12.5}


@pytest.mark.parametrize("value", ["soon", "", "0", "-1", "nan", "inf", "1e9"])
def test_a_bad_slo_header_is_refused_by_name(value: str) -> None:
    with pytest.raises(FieldError, match=r"x-slo-tpot-ms=.*above 0 and at most"):
        requests.prepare(generate(), Headers({"x-slo-tpot-ms": value}))


def test_preparing_twice_changes_nothing_more() -> None:
    headers = Headers({"x-slo-tpot-ms": "12.5"})
    obj = generate(params({"group": "g"}))
    requests.prepare(obj, headers)
    once = copy.deepcopy(obj.sampling_params)
    requests.prepare(obj, headers)
    assert obj.sampling_params == once


def test_items_of_a_batch_own_their_metadata() -> None:
    obj = normalised(generate(params({"group": "g"}), text=["a", "b", "c"]))
    metas = [meta_of(p) for p in obj.sampling_params]
    assert [m["group"] for m in metas] == ["g"] * 3
    assert len({id(m) for m in metas}) == 3
    assert len({id(p["custom_params"]) for p in obj.sampling_params}) == 3


def test_a_batch_without_metadata_gets_none() -> None:
    obj = normalised(generate({"temperature": 0}, text=["a", "b"]))
    assert obj.sampling_params == [{"temperature": 0}] * 2


def test_siblings_are_numbered_in_the_order_they_are_sent() -> None:
    obj = normalised(generate({"n": 3}))
    metas = sent(obj[0].sampling_params)
    assert [m["branch"] for m in metas] == [0, 0, 1, 2]
    assert {m["width"] for m in metas} == {3}
    assert {m["depth"] for m in metas} == {1}
    assert len({m["group"] for m in metas}) == 1


def test_siblings_stay_in_order_when_nothing_is_to_be_generated() -> None:
    obj = normalised(generate({"n": 3, "max_new_tokens": 0}))
    assert [m["branch"] for m in sent(obj[0].sampling_params)] == [0, 0, 1, 2]


def test_siblings_are_numbered_without_a_warm_up_too() -> None:
    obj = normalised(generate({"n": 2}))
    metas = sent(obj[0].sampling_params, warm_up=False)
    assert [m["branch"] for m in metas] == [0, 1]


def test_siblings_share_no_object_with_each_other() -> None:
    obj = normalised(generate({"n": 3}))
    metas = sent(obj[0].sampling_params)
    assert len({id(m) for m in metas}) == 4
    assert all(type(m) is dict and parse_branch_meta(wire(m)) for m in metas)


def test_numbering_a_sibling_keeps_the_shared_parameters_as_they_were() -> None:
    obj = normalised(generate({"n": 2, "temperature": 0.5}))
    shared = SamplingParams(**obj[0].sampling_params)
    one = SimpleNamespace(sampling_params=shared)
    requests.number_sibling_hook(None, one)
    assert one.sampling_params is not shared
    assert one.sampling_params.temperature == shared.temperature
    assert isinstance(shared.custom_params["taper"], requests.SiblingMeta)


def seeds(seed: int | None, n: int) -> list[int | None]:
    """The sampling seeds of everything sent for one `n>1` call, warm-up first."""
    obj = normalised(generate({"n": n, "sampling_seed": seed}))
    shared = SamplingParams(**obj[0].sampling_params)
    first = copy.copy(shared)
    first.max_new_tokens = 0
    tokenized = [SimpleNamespace(sampling_params=p) for p in [first, *[shared] * n]]
    for request in tokenized:
        requests.number_sibling_hook(None, request)
        request.sampling_params.verify(49152)
    assert shared.sampling_seed == seed
    return [t.sampling_params.sampling_seed for t in tokenized]


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63 - 1, -(2**63)])
def test_samples_of_one_seed_get_different_seeds_that_sglang_accepts(seed: int) -> None:
    warm_up, *samples = seeds(seed, 64)
    assert warm_up == samples[0] == seed
    assert len(set(samples)) == 64


def test_the_same_call_gets_the_same_seeds_again() -> None:
    assert seeds(7, 8) == seeds(7, 8)
    assert seeds(7, 4) == seeds(7, 8)[:5]
    assert not set(seeds(7, 8)) & set(seeds(8, 8))


def test_the_derived_seeds_stay_what_they_are() -> None:
    # A program that was recorded with one version must repeat with the next.
    assert requests.sibling_seed(42, 1) == 2537786547777265633


def test_samples_without_a_seed_get_none() -> None:
    assert seeds(None, 3) == [None] * 4


def test_each_prompt_of_a_batch_with_n_is_a_group_of_its_own() -> None:
    obj = normalised(generate({"n": 2}, text=["a", "b"]))
    groups = [{m["group"] for m in sent(obj[i].sampling_params)} for i in range(2)]
    assert all(len(group) == 1 for group in groups)
    assert groups[0] != groups[1]
    assert len(obj.sampling_params) == len(obj.text) == 4


def test_n_forks_below_the_metadata_it_is_given() -> None:
    given = {"group": "g", "branch": 1, "width": 2, "depth": 2, "stage": 5}
    given |= {"parent": "r", "tpot_slo_ms": 9.0}
    obj = normalised(generate(params(given, n=2)))
    metas = [parse_branch_meta(wire(m)) for m in sent(obj[0].sampling_params)[1:]]
    for i, meta in enumerate(metas):
        assert (meta.group, meta.branch, meta.width) == ("g", i, 2)
        assert (meta.depth, meta.stage, meta.parent) == (3, 5, "r")
        assert meta.tpot_slo_ms == 9.0


def test_n_with_slos_only_still_makes_a_group() -> None:
    obj = normalised(generate(params({"ttft_slo_ms": 5}, n=2)))
    metas = sent(obj[0].sampling_params)
    assert all(m["group"] and m["ttft_slo_ms"] == 5.0 for m in metas)


def test_two_calls_get_different_groups() -> None:
    first, second = (normalised(generate({"n": 2}))[0] for _ in range(2))
    assert meta_of(first.sampling_params) != meta_of(second.sampling_params)


def test_an_n_above_the_widest_fork_is_refused() -> None:
    with pytest.raises(FieldError, match=f"n={MAX_WIDTH + 1} .* 1 to {MAX_WIDTH}"):
        requests.prepare(generate({"n": MAX_WIDTH + 1}))


def test_a_fork_below_the_deepest_level_is_refused() -> None:
    with pytest.raises(FieldError, match=f"depth={MAX_DEPTH} .* less than {MAX_DEPTH}"):
        requests.prepare(generate(params({"group": "g", "depth": MAX_DEPTH}, n=2)))


def test_a_beam_request_is_not_forked() -> None:
    obj = normalised(generate({"n": 2, "beam_width": 2}))
    assert "custom_params" not in obj.sampling_params


def test_shared_metadata_pickles_as_a_plain_dict() -> None:
    meta = meta_of(normalised(generate({"n": 2}))[0].sampling_params)
    assert type(pickle.loads(pickle.dumps(meta))) is dict
    assert pickle.loads(pickle.dumps(meta)) == meta


def tokenized(custom_params: Any) -> TokenizedGenerateReqInput:
    """A request as it leaves the tokenizer process, created at second 7."""
    return TokenizedGenerateReqInput(
        input_text="",
        input_ids=array("q", [1, 2]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(custom_params=custom_params),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        time_stats=SimpleNamespace(created_time=7.0),
    )


@pytest.mark.parametrize(
    "custom", [None, {}, {"theirs": 1}, {"taper": {"group": "g"}, "theirs": 1}]
)
def test_every_request_tells_the_ranks_when_it_came(
    custom: dict[str, Any] | None,
) -> None:
    request = tokenized(copy.deepcopy(custom))
    before = request.sampling_params
    requests.number_sibling_hook(None, request)
    sent = request.sampling_params.custom_params
    assert sent.pop("taper") == {**(custom or {}).get("taper", {}), "arrived_ms": 7000}
    assert sent == {k: v for k, v in (custom or {}).items() if k != "taper"}
    assert before.custom_params == custom


def test_a_client_cannot_say_when_its_request_came() -> None:
    with pytest.raises(FieldError, match="arrived_ms"):
        requests.prepare(generate(params({"group": "g", "arrived_ms": 1.0})))


def test_a_request_of_another_kind_passes_untouched() -> None:
    embedding = SimpleNamespace(sampling_params={"custom_params": {"taper": 1}})
    requests.prepare_request_hook(None, embedding)
    requests.number_sibling_hook(None, SimpleNamespace(sampling_params=embedding))
    assert embedding.sampling_params == {"custom_params": {"taper": 1}}


def test_the_request_hook_reads_headers_where_there_are_some() -> None:
    obj, from_engine = generate(), generate()
    requests.prepare_request_hook(None, obj, http({"x-slo-ttft-ms": "7"}))
    requests.prepare_request_hook(None, from_engine)
    assert meta_of(obj.sampling_params) == {"ttft_slo_ms": 7.0}
    assert from_engine.sampling_params is None


def http(headers: dict[str, str]) -> Request:
    return Request({"type": "http", "headers": Headers(headers).raw})


def serve(obj: Any) -> Any:
    async def stock(obj: Any, request: Any) -> str:
        return "streamed"

    return asyncio.run(refuse_before_stream_hook(stock, obj, http({})))


def test_a_bad_streaming_request_is_a_400_before_the_stream() -> None:
    answer = serve(generate(params({"group": ""}), stream=True))
    assert answer.status_code == 400
    assert "taper.group=''" in json.loads(answer.body)["error"]["message"]


def test_a_good_streaming_request_is_served() -> None:
    assert serve(generate(params({"group": "g"}), stream=True)) == "streamed"


@pytest.mark.parametrize(
    ("meta", "n", "parts"),
    [
        ({"first_k": 4}, 3, ["first_k=4", "branches, 3"]),
        ({"first_k": 2}, 1, ["first_k=2", "branches, 1"]),
        ({"first_k": 0}, 3, ["first_k=0", "1 to 4096"]),
        ({"group": "g", "width": 2, "first_k": 3}, 1, ["first_k=3", "branches, 2"]),
        ({"group": "g", "first_k": 4}, 3, ["first_k=4", "branches, 3"]),
    ],
)
def test_more_than_all_branches_cannot_be_the_first(
    meta: dict[str, Any], n: int, parts: list[str]
) -> None:
    with pytest.raises(FieldError) as caught:
        requests.prepare(generate(params(meta, n=n)))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_first_k_of_n_samples_reaches_every_one() -> None:
    obj = normalised(generate(params({"first_k": 2}, n=3)))
    metas = [wire(m) for m in sent(obj[0].sampling_params)[1:]]
    assert [(m["branch"], m["width"], m["first_k"]) for m in metas] == [
        (i, 3, 2) for i in range(3)
    ]
