"""`sglang-taper demo` as its user runs it: to the end, interrupted, and bereft."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_taper.demo.load import QUICK, make_mix
from sglang_taper.server_process import session_members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

COMMAND = str(Path(sysconfig.get_path("scripts")) / "sglang-taper")
# Any plausible one: it saves the calibration of servers that are ended half-way.
PROFILE = {
    "a_ms": 40.0,
    "b_ms_per_row": 3.0,
    "c_ms_per_token": 0.02,
    "shared_read_once": False,
    "graph_buckets": [],
}


class RunningDemo:
    """A demo in a process of its own, with what it printed so far."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [COMMAND, "demo", "--quick", *flags], stdout=out, stderr=err
            )
        self.session = self._server_session()

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def _server_session(self) -> int:
        """The server leads a session of its own."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while True:
            for child in map(int, children.read_text().split()):
                if os.getsid(child) == child:
                    return child
            assert self.process.poll() is None, self.stderr
            time.sleep(0.05)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, self.stdout + self.stderr
            time.sleep(0.1)

    def members(self) -> dict[int, str]:
        return session_members(self.session)


@contextlib.contextmanager
def running_demo(folder: Path, *flags: str) -> Iterator[RunningDemo]:
    demo = RunningDemo(folder, *flags)
    try:
        yield demo
    finally:
        demo.process.kill()
        demo.process.wait()
        for pid in demo.members():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def profile(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(PROFILE))
    return "--", "--latency-profile", str(file)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything a complete demo leaves behind.

    Played again, once, if the machine became too slow between `off`, of which the SLO
    comes, and `taper`: the demo says so, and which rows it defers is chance then.
    """
    first = finish_demo(tmp_path_factory.mktemp("demo"))
    if "the machine was slower" not in first["stdout"]:
        return first
    return finish_demo(tmp_path_factory.mktemp("demo"))


def finish_demo(folder: Path) -> dict[str, Any]:
    with running_demo(folder, "--json", str(folder / "facts.json")) as demo:
        code = demo.process.wait()
        left = demo.members()
        assert code == 0, demo.stdout + demo.stderr
        return {
            "left": left,
            "stdout": demo.stdout,
            "stderr": demo.stderr,
            "facts": json.loads((folder / "facts.json").read_text()),
        }


def test_a_complete_demo_leaves_no_process(finished):
    assert finished["left"] == {}
    assert "Traceback" not in finished["stderr"]


def test_the_program_forks_over_its_points_and_is_shown(finished):
    program = finished["facts"]["program"]
    width = len(program["points"])
    assert width >= 3
    written = program["requests"][0]["branches"]
    assert len(written) == width
    assert all(branch["run"] > 0 for branch in written)
    assert 1 <= program["mean_width"] <= width
    assert program["num_prefix_shared_tokens"] > 0
    assert max(program["width_over_time"]) <= width
    assert program["num_serial"] >= 3
    for index in range(width):
        assert f"[branch {index + 1}]   " in finished["stdout"]
    assert "[summary]   " in finished["stdout"]


def test_every_policy_gets_the_same_requests(finished):
    policies = finished["facts"]["comparison"]["policies"]
    assert list(policies) == ["off", "eager", "taper"]
    mix = make_mix(QUICK, seed=0)
    sizes = {
        name: sorted((r["name"], r["num_tokens"]) for r in facts["requests"])
        for name, facts in policies.items()
    }
    assert sizes["off"] == sizes["eager"] == sizes["taper"]
    assert sum(tokens for _, tokens in sizes["off"]) == mix.num_tokens
    num_branches = sum(len(fork.suffixes) for fork in mix.forks)
    for facts in policies.values():
        forked = [r["branches"] for r in facts["requests"] if r["is_forked"]]
        assert sum(map(len, forked)) == num_branches


def test_policies_differ_in_width_and_in_the_rows_they_defer(finished):
    policies = finished["facts"]["comparison"]["policies"]
    off, eager, taper = (policies[name] for name in ("off", "eager", "taper"))
    assert eager["num_rows_deferred"] == 0
    assert 0 < taper["num_rows_deferred"] < off["num_rows_deferred"]
    assert off["mean_width"] == pytest.approx(1, abs=0.1)
    assert 1 <= taper["mean_width"] < eager["mean_width"]


def test_json_and_table_hold_the_same_facts(finished):
    comparison = finished["facts"]["comparison"]
    slo = comparison["slo"]
    assert slo["tpot_ms"] == pytest.approx(1.3 * comparison["off_serial_tpot_ms"])
    for facts in comparison["policies"].values():
        good = sum(request["is_good"] for request in facts["requests"])
        assert facts["slo_attainment"] == good / facts["num_requests"]
        assert facts["token_goodput"] <= facts["output_throughput"]
        assert facts["predicted_ms"] > 0
        assert facts["measured_ms"] > 0
        assert facts["mape"] >= 0
    deferred = [str(f["num_rows_deferred"]) for f in comparison["policies"].values()]
    assert any(
        line.split()[2:] == deferred
        for line in finished["stdout"].split("\n")
        if line.startswith("rows deferred")
    )
    assert comparison["verdict"] in finished["stdout"]


def test_ctrl_c_in_the_middle_leaves_no_process(tmp_path, profile):
    with running_demo(tmp_path, *profile) as demo:
        demo.wait_for(lambda: "[branch 1]   " in demo.stdout)
        assert demo.members()
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(60) == 128 + signal.SIGINT
        assert demo.members() == {}
        assert demo.stderr == "sglang-taper demo: interrupted\n"


def test_a_killed_scheduler_ends_the_demo_with_one_sentence(tmp_path, profile):
    with running_demo(tmp_path, *profile) as demo:
        demo.wait_for(lambda: "[branch 1]   " in demo.stdout)
        (scheduler,) = (
            pid for pid, name in demo.members().items() if "sglang::schedul" in name
        )
        os.kill(scheduler, signal.SIGKILL)
        assert demo.process.wait(60) == 1
        assert demo.members() == {}
        (sentence,) = demo.stderr.splitlines()
        assert "the server ended while it was needed" in sentence
        assert "Traceback" not in demo.stdout
        log = Path(sentence.rpartition(" ")[2])
        assert log.stat().st_size > 0
        log.unlink()
