"""What the state says about the engine and its machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_parts import Shape, engine_settings

from sglang_taper.engine.machine import describe_engine

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def described() -> dict[str, Any]:
    scheduler = SimpleNamespace(
        model_config=SimpleNamespace(
            model_path="/somewhere/model", dtype=torch.bfloat16, vocab_size=32
        ),
        max_req_len=400,
        max_running_requests=12,
        device="cpu",
        page_size=16,
        enable_overlap=True,
    )
    with engine_settings(Shape("rust", 16, True)):
        return describe_engine(scheduler)


def test_it_can_be_sent_as_json_and_says_what_steps_depend_on(
    described: dict[str, Any],
) -> None:
    assert json.loads(json.dumps(described)) == described
    assert described["dtype"] == "bfloat16"
    assert described["device"].startswith("cpu: ")
    assert described["num_threads"] == torch.get_num_threads()
    assert described["versions"].keys() == {"python", "sglang", "sglang-taper", "torch"}
    assert (described["tp_size"], described["page_size"]) == (1, 16)


def test_each_of_its_keys_is_explained(described: dict[str, Any]) -> None:
    (row,) = re.findall(r"^\| `engine` \|.*$", OPERATIONS.read_text(), re.M)
    assert set(described) == set(re.findall(r"`(\w+)`", row)) - {"engine"}
