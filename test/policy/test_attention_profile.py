"""The file of measured constants is checked entry by entry."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sglang_taper.errors import FieldError
from sglang_taper.policy.attention_gate import AttentionConstants, constants_to_profile
from sglang_taper.policy.attention_profile import (
    find_measured,
    heads_label,
    measured_from_profile,
)

CONSTANTS = AttentionConstants(4e6, 5e6, 4e8, 5.0, 8.0, 0.0, 0.02)
ENTRY: dict[str, Any] = {
    "device": "A GPU",
    "heads": "64/8/128",
    "name": "cascade 64",
    "tile_rows": 64,
    "constants": constants_to_profile(CONSTANTS),
}


def test_an_entry_tells_constants_and_the_layer_they_are_for() -> None:
    (entry,) = measured_from_profile([ENTRY])
    assert entry.constants == CONSTANTS
    shape = entry.shape
    assert (shape.num_kv_heads, shape.head_ratio, shape.head_dim) == (8, 8, 128)
    assert (shape.tile_rows, shape.kv_bytes_per_token) == (64, 4096)


def test_only_an_exact_match_counts_as_measured() -> None:
    entries = measured_from_profile([ENTRY, ENTRY | {"name": "triton"}])
    heads = heads_label(64, 8, 128)
    assert find_measured(entries, "A GPU", heads, "cascade 64") == entries[0]
    assert find_measured(entries, "A GPU", heads, "triton") == entries[1]
    assert find_measured(entries, "Another GPU", heads, "triton") is None
    assert find_measured(entries, "A GPU", "8/1/128", "triton") is None
    assert find_measured(entries, "A GPU", heads, "cascade 128") is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": 3}, r"\[1\]\.device=3"),
        ({"heads": "64/8"}, r"\[1\]\.heads='64/8'"),
        ({"heads": "64/0/128"}, r"\[1\]\.heads"),
        ({"heads": "64/7/128"}, r"\[1\]\.heads"),
        ({"heads": "a/b/c"}, r"\[1\]\.heads"),
        ({"tile_rows": 0}, r"\[1\]\.tile_rows=0"),
        ({"tile_rows": True}, r"\[1\]\.tile_rows=True"),
        ({"constants": []}, r"\[1\]\.constants"),
        ({"constants": {"error": 1}}, "attention_profile.dram_bytes_per_us"),
        ({"extra": 1}, r"attention_profile\[1\]="),
    ],
)
def test_a_wrong_entry_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError, match=field):
        measured_from_profile([ENTRY, copy.deepcopy(ENTRY) | changes])


@pytest.mark.parametrize("profile", [{}, [], "text", None])
def test_a_file_must_hold_a_list_of_entries(profile: object) -> None:
    with pytest.raises(FieldError, match="a list with an entry per measurement"):
        measured_from_profile(profile)
