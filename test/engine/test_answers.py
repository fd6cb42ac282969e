"""The scheduler's figures of a branch, as they appear in an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_taper.engine import requests


def report(info: dict[str, Any], index: int, finish_reason: Any) -> dict[str, Any]:
    meta_info: dict[str, Any] = {}
    passed: dict[str, Any] = {}

    def stock(_m: Any, meta: Any, _s: Any, others: Any, i: int, _f: Any) -> None:
        passed.update({k: v[i] for k, v in others.items()})

    requests.report_branch_hook(
        stock, None, meta_info, None, info, index, finish_reason
    )
    assert "taper" not in passed
    return {**passed, **meta_info}


def test_the_final_answer_of_a_branch_has_its_figures_as_a_dict() -> None:
    info = {"taper": [[], [{"branch": 1}]], "other": [[1], [2]]}
    assert report(info, 1, {"type": "stop"}) == {"other": [2], "taper": {"branch": 1}}
    assert report(info, 0, None) == {"other": [1]}
    assert list(info) == ["taper", "other"]


def test_an_answer_without_figures_is_reported_as_stock_does() -> None:
    # None is what a worker of several tokenizers gets for a list that is too short
    assert report({"taper": [None]}, 0, None) == {}
    assert report({"other": [[3]]}, 0, None) == {"other": [3]}


def choices(*metas: Any) -> list[dict[str, Any]]:
    return [{"meta_info": {} if m is None else {"taper": m}} for m in metas]


def test_openai_metadata_lists_the_branches_by_choice() -> None:
    response = SimpleNamespace(metadata={"weight_version": "1"})
    ret = choices({"branch": 0}, {"branch": 1})
    requests.report_choices_hook(response, None, None, ret, 0)
    assert response.metadata == {
        "weight_version": "1",
        "taper": [{"branch": 0}, {"branch": 1}],
    }


def test_openai_metadata_of_an_ungrouped_answer_stays_as_it_was() -> None:
    response = SimpleNamespace(metadata={"weight_version": "1"})
    requests.report_choices_hook(response, None, None, choices(None), 0)
    assert response.metadata == {"weight_version": "1"}


def test_an_openai_error_response_is_left_alone() -> None:
    error = SimpleNamespace(status_code=500)
    requests.report_choices_hook(error, None, None, choices({"branch": 0}), 0)
    assert vars(error) == {"status_code": 500}
