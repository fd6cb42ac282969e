"""The latency model that a scheduler starts with."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_taper.config import TaperConfig
from sglang_taper.engine.step_model import make_latency_model

PROFILE = {"a_ms": 5.0, "b_ms_per_row": 0.1, "c_ms_per_token": 1e-5}


def test_without_a_profile_it_knows_the_captured_sizes_and_is_not_trusted() -> None:
    model = make_latency_model(TaperConfig(branch_policy="taper"), [4, 1, 2], False)
    assert model.graph_buckets == (1, 2, 4)
    assert not model.trusted


def test_a_profile_without_captured_sizes_takes_those_of_the_engine(
    tmp_path: Path,
) -> None:
    path = tmp_path / "profile.json"
    config = TaperConfig(branch_policy="taper", latency_profile=str(path))
    path.write_text(json.dumps(PROFILE))
    assert make_latency_model(config, [4, 1, 2], False).graph_buckets == (1, 2, 4)
    path.write_text(json.dumps({**PROFILE, "graph_buckets": [8]}))
    assert make_latency_model(config, [4, 1, 2], False).graph_buckets == (8,)


def test_how_shared_prefixes_count_is_a_fact_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE, "shared_read_once": True}))
    config = TaperConfig(branch_policy="taper", latency_profile=str(path))
    for fact in (False, True):
        model = make_latency_model(config, [], fact)
        assert model.coefficients().shared_read_once is fact
