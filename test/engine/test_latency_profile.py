"""The latency model that a scheduler starts with."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_taper.config import TaperConfig
from sglang_taper.engine.scheduler import _latency_model

PROFILE = {"a_ms": 5.0, "b_ms_per_row": 0.1, "c_ms_per_token": 1e-5}


def test_without_a_profile_it_knows_the_captured_sizes_and_is_not_trusted() -> None:
    model = _latency_model(TaperConfig(branch_policy="taper"), [4, 1, 2])
    assert model.graph_buckets == (1, 2, 4)
    assert not model.trusted


def test_a_profile_without_captured_sizes_takes_those_of_the_engine(
    tmp_path: Path,
) -> None:
    path = tmp_path / "profile.json"
    config = TaperConfig(branch_policy="taper", latency_profile=str(path))
    path.write_text(json.dumps(PROFILE))
    assert _latency_model(config, [4, 1, 2]).graph_buckets == (1, 2, 4)
    path.write_text(json.dumps({**PROFILE, "graph_buckets": [8]}))
    assert _latency_model(config, [4, 1, 2]).graph_buckets == (8,)
