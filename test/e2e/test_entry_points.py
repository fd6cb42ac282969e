"""Every way in: plain sglang.launch_server, YAML, Engine, several workers, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workload import STORY, branch_request, run_all

from server import SMALL_POOL, Server, running_server

ENGINE_PROGRAM = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path="smollm2", max_total_tokens=4096, max_running_requests=8,
        **json.loads(sys.argv[1]),
    )
    try:
        sampling = {"n": 3, "temperature": 0, "max_new_tokens": 6}
        answers = engine.generate("One day", sampling)
        print(json.dumps([a["meta_info"].get("taper") for a in answers]))
        bad = {"custom_params": {"taper": {"group": "a b"}}}
        try:
            engine.generate("One day", bad)
        except ValueError as error:
            print(error)
    finally:
        engine.shutdown()
"""


def run_engine(
    tmp_path: Path, keywords: dict[str, Any], **env: str
) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(ENGINE_PROGRAM)
    return subprocess.run(
        [sys.executable, str(program), json.dumps(keywords)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("way", ["keyword", "environment"])
def test_engine_takes_the_policy(tmp_path: Path, way: str) -> None:
    if way == "keyword":
        done = run_engine(tmp_path, {"branch_policy": "off"})
    else:
        done = run_engine(tmp_path, {}, SGLANG_TAPER_BRANCH_POLICY="off")
    assert done.returncode == 0, done.stderr[-3000:]
    metas, error = done.stdout.strip().splitlines()[-2:]
    assert [meta["branch"] for meta in json.loads(metas)] == [0, 1, 2]
    assert all(meta["steps_deferred"] > 0 for meta in json.loads(metas))
    assert "group='a b'" in error


def test_engine_refuses_a_bad_setting_by_name(tmp_path: Path) -> None:
    done = run_engine(tmp_path, {"branch_policy": "cap", "branch_cap": 0})
    assert done.returncode != 0
    assert "--branch-cap=0" in done.stderr


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Plain sglang.launch_server, settings from YAML, two tokenizer workers."""
    path = tmp_path_factory.mktemp("config") / "server.yaml"
    path.write_text("branch-policy: cap\nbranch-cap: 2\ntpot-slo-ms: 77\n")
    flags = ("--config", str(path), "--tokenizer-worker-num", "2")
    with running_server(*flags, module="sglang.launch_server") as server:
        yield server


def test_yaml_settings_are_in_force(two_workers: Server) -> None:
    params = two_workers.state()["params"]
    assert (params["policy"], params["cap"], params["tpot_slo_ms"]) == ("cap", 2, 77)


def test_every_tokenizer_worker_knows_branches(two_workers: Server) -> None:
    bodies = [branch_request(STORY, "workers", i, 8) for i in range(8)]
    metas = [a["meta_info"]["taper"] for a in run_all(two_workers, bodies)]
    assert [meta["branch"] for meta in metas] == list(range(8))
    assert sum(meta["steps_deferred"] for meta in metas) > 0
    bad = branch_request(STORY, "a b", 0, 1)
    for _ in range(6):  # whichever worker gets it
        assert two_workers.post("/generate", bad).status_code == 400
    assert two_workers.set_policy(policy="eager")["params"]["policy"] == "eager"


def start(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_taper.launch_server"]
    command += ["--model-path", "smollm2", *SMALL_POOL, *flags]
    return subprocess.run(
        command,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "env", "shown"),
    [
        (["--enable-mixed-chunk"], {}, "--enable-mixed-chunk=True"),
        (["--pp-size", "2"], {}, "--pp-size=2"),
        ([], {"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER"),
        (["--branch-policy", "fastest"], {}, "eager"),
        (["--tpot-slo-ms", "-3"], {}, "--tpot-slo-ms='-3'"),
        (["--latency-profile", "/nowhere.json"], {}, "--latency-profile"),
        ([], {"SGLANG_TAPER_SLACK_FRACTION": "7"}, "--slack-fraction='7'"),
        (["--shared-prefix-attention", "triton"], {}, "needs CUDA"),
    ],
)
def test_what_we_refuse_ends_with_code_2_and_one_paragraph(
    flags: list[str], env: dict[str, str], shown: str
) -> None:
    done = start(*flags, **env)
    assert done.returncode == 2, done.stderr[-2000:]
    (line,) = [row for row in done.stderr.splitlines() if "sglang_taper: error" in row]
    assert shown in line
    assert "Traceback" not in done.stderr
