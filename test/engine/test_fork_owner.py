"""Who may fork a live request by its id: whoever has sent it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.datastructures import Headers

from sglang_taper.engine import requests, token_ids
from sglang_taper.engine.fork_api import prompts
from sglang_taper.engine.headers import scope_of
from sglang_taper.errors import FieldError

GROUPED = {"custom_params": {"taper": {"group": "g"}}}
KINDS = {
    "single": ("a", {}),
    "grouped": ("a", GROUPED),
    "sample": ("a", {"n": 2}),
    "grouped item of a batch": (["a", "b"], GROUPED),
}


def owner(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def running(key: str, text: Any, sampling: dict[str, Any]) -> Any:
    """A manager with one request of that caller, which has said one token."""
    obj = GenerateReqInput(text=text, sampling_params=sampling)
    request: Any = SimpleNamespace(headers=Headers(owner(key)))
    requests.prepare_request_hook(None, obj, request)
    obj.normalize_batch_and_arguments()
    requests.assign_groups_hook(None, obj)
    one = obj if obj.is_single else obj[0]
    setattr(one, token_ids._PROMPT_IDS, [5, 6])
    return SimpleNamespace(rid_to_state={"r": SimpleNamespace(obj=one, output_ids=[7])})


def fork(manager: Any, key: str) -> Any:
    return prompts._known_request("r", {}, manager, scope_of(Headers(owner(key))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["", "hers"])
def test_its_sender_may_fork_a_live_request_and_nobody_else(
    kind: str, key: str
) -> None:
    manager = running(key, *KINDS[kind])
    assert fork(manager, key).pieces == ((5, 6, 7),)
    for stranger in {"", "hers", "his"} - {key}:
        with pytest.raises(FieldError, match=r"body\.rid"):
            fork(manager, stranger)


def test_an_item_of_a_batch_without_a_group_is_nobodys() -> None:
    """SGLang keeps nothing of it that says who has sent it."""
    for key in ("", "hers"):
        with pytest.raises(FieldError, match=r"body\.rid"):
            fork(running(key, ["a", "b"], {}), key)
