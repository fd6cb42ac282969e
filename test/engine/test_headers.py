"""SLOs and owners from headers, and groups of the same id that are not one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.datastructures import Headers

from sglang_taper.engine import requests
from sglang_taper.engine.arrival import checked_metadata
from sglang_taper.engine.groups import GroupTable
from sglang_taper.engine.headers import id_in, name_in, scope_in, scope_of
from sglang_taper.errors import FieldError
from sglang_taper.policy.types import PolicyParams


def scope(authorization: str) -> str:
    return scope_of(Headers({"Authorization": authorization}))


def sent(headers: dict[str, str], text: Any = "a", **sampling: Any) -> Any:
    """The normalised request of a caller with these headers."""
    obj = GenerateReqInput(text=text, sampling_params=sampling)
    requests.prepare_request_hook(None, obj, SimpleNamespace(headers=Headers(headers)))
    obj.normalize_batch_and_arguments()
    requests.assign_groups_hook(None, obj)
    return obj


def metas_of(obj: Any) -> list[dict[str, Any]]:
    given = obj.sampling_params
    params = given if isinstance(given, list) else [given]
    return [dict(p["custom_params"]["taper"]) for p in params]


GROUP = {"taper": {"group": "g"}}


def test_a_scope_stands_for_the_credential_and_does_not_show_it() -> None:
    assert scope("Bearer key") == scope("bearer key") == scope("key")
    assert scope("Bearer key") != scope("Bearer other")
    assert len(scope("Bearer key")) == 32
    assert scope_of(Headers({})) == scope(" ") == ""


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"custom_params": GROUP}, "a"),
        ({"custom_params": GROUP}, ["a", "b"]),
        ({"custom_params": GROUP, "n": 3}, "a"),
        ({"n": 3}, ["a", "b"]),
    ],
    ids=["single", "batch", "samples", "batch of samples"],
)
def test_whose_a_group_is_travels_with_every_branch(
    sampling: dict[str, Any], text: Any
) -> None:
    mine = metas_of(sent({"authorization": "Bearer mine"}, text, **sampling))
    assert {meta["scope"] for meta in mine} == {scope("mine")}
    nobodys = metas_of(sent({}, text, **sampling))
    assert all("scope" not in meta for meta in nobodys)


def test_whose_it_is_reaches_a_sibling_that_sglang_sends() -> None:
    (meta, *_) = sent({"authorization": "Bearer mine"}, n=2).sampling_params
    params = SimpleNamespace(
        custom_params=meta["custom_params"], max_new_tokens=4, sampling_seed=None
    )
    tokenized = SimpleNamespace(sampling_params=params)
    requests.number_sibling_hook(None, tokenized)
    sibling = tokenized.sampling_params.custom_params["taper"]
    assert (sibling["scope"], sibling["branch"]) == (scope("mine"), 0)


def test_a_client_cannot_name_an_owner() -> None:
    for meta in ({"group": "g", "scope": "x"}, {"group": "x/g"}):
        with pytest.raises(FieldError):
            sent({}, custom_params={"taper": meta})


def test_a_request_without_a_group_has_no_owner() -> None:
    obj = sent(
        {"authorization": "k"}, custom_params={"taper": {"tpot_slo_ms": 5}, "t": 1}
    )
    assert metas_of(obj) == [{"tpot_slo_ms": 5.0}]
    assert checked_metadata({"tpot_slo_ms": 5.0}).group is None


def test_the_same_id_of_two_callers_names_two_groups() -> None:
    table = GroupTable(ttl_s=0)
    raws = [{"group": "g"}, *({"group": "g", "scope": s} for s in "ab")]
    branches = [
        table.attach(raw.get("scope", ""), checked_metadata(raw), PolicyParams(), 0, 8)
        for raw in raws
    ]
    names = [branch.meta.group for branch in branches]
    assert names == ["g", "a/g", "b/g"] == [name_in(raw) for raw in raws]
    assert len({id(branch.group) for branch in branches}) == 3
    assert [id_in(n) for n in names] == ["g"] * 3
    assert [scope_in(n) for n in names] == ["", "a", "b"]


def test_groups_are_found_by_id_for_one_caller_or_for_all() -> None:
    table = GroupTable(ttl_s=0)
    for raw in ({"group": "g"}, {"group": "g", "scope": "a"}, {"group": "h"}):
        meta = checked_metadata(raw)
        table.end(table.attach("r", meta, PolicyParams(), 0.0, 8), 0.0)
    assert table.named("g", None) == ["g", "a/g"]
    assert table.named("g", "a") == ["a/g"]
    assert table.named("g", "b") == table.named("i", None) == []
    table.forget_idle(5000.0)
    assert table.named("g", None) == []


def test_metadata_that_went_around_the_checks_makes_a_request_that_stands_alone() -> (
    None
):
    assert checked_metadata({"group": "a/b", "scope": "s"}).group is None
