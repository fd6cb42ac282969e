"""The timeline of a fork on a real server, over HTTP and by the command."""

from __future__ import annotations

import json
import uuid

import pytest
from workload import STORY, branch_request, run_all

from server import Server
from sglang_taper import cli

WIDTH = 4


@pytest.fixture(scope="module")
def group(taper_server: Server) -> str:
    """A fork that has run with one branch at a time, and its join."""
    taper_server.set_policy(policy="off")
    name = uuid.uuid4().hex
    bodies = [
        branch_request(f"{STORY} {i}.", name, i, WIDTH, ignore_eos=True)
        | {"rid": f"{name}/{i}"}
        for i in range(WIDTH)
    ]
    run_all(taper_server, bodies)
    join = branch_request(STORY + " So", name, 0, 1, max_new_tokens=4)
    join["sampling_params"]["custom_params"]["taper"] |= {"depth": 0, "stage": 1}
    taper_server.generate(join | {"rid": f"{name}/join"})
    return name


def test_a_fork_is_told_from_its_queue_to_its_join(
    taper_server: Server, group: str
) -> None:
    told = taper_server.get(f"/taper/requests/{group}").json()
    assert {b["status"] for b in told["branches"]} == {"done"}
    assert sum(b["steps_deferred"] for b in told["branches"]) > WIDTH
    (fork,) = told["forks"]
    assert fork["joined_by"] == f"{group}/join"
    assert fork["opened_ms"] < fork["ended_ms"] <= fork["joined_ms"]
    for branch in told["branches"]:
        assert [s["status"] for s in branch["spans"][:2]] == ["queued", "prefill"]
        reasons = {s["reason"] for s in branch["spans"] if s["status"] == "deferred"}
        assert reasons <= {"baseline"}


def test_the_answer_of_a_branch_and_its_timeline_agree(
    taper_server: Server, group: str
) -> None:
    told = taper_server.get(f"/taper/requests/{group}/1").json()
    (branch,) = told["branches"]
    assert told["kind"] == "branch"
    assert branch["finish"] == "length"
    assert branch["steps_run"] + branch["steps_deferred"] > branch["output_tokens"]
    assert STORY[:20] not in json.dumps(told)


def test_an_id_that_never_came_is_a_404(taper_server: Server) -> None:
    answer = taper_server.get("/taper/requests/never-came")
    assert answer.status_code == 404
    assert "never-came" in answer.json()["error"]["message"]


def test_the_command_draws_the_timeline(
    taper_server: Server, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", group, "--base-url", taper_server.url]) == 0
    out = capsys.readouterr().out
    assert f"request {group}: {WIDTH + 1} branches" in out
    assert "the policy runs one branch of each request" in out
    assert f"joined by {group}/join" in out
    charts = [line for line in out.splitlines() if "#" in line and "=" in line]
    assert len(charts) >= WIDTH - 1


def test_requests_that_ended_are_counted_against_their_slos(
    taper_server: Server, group: str
) -> None:
    service = taper_server.get("/taper/live").json()["service"]
    assert service["num_requests_ended"] >= 1
    assert 0 <= service["slo_attainment"] <= 1
    assert service["num_requests_in_slo"] <= service["num_requests_ended"]
