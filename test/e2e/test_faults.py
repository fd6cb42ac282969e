"""Bad input and faults: a clear answer, siblings go on, KV comes back."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests as http
from workload import STORY, branch_request, outputs, run_all

from server import Server

LONG = {"max_new_tokens": 120, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _idle_pool_at_both_ends(taper_server: Server) -> Any:
    """Every test starts and ends with an engine whose whole pool is free."""
    taper_server.set_policy(policy="off")
    taper_server.flush()
    yield
    taper_server.flush()
    assert taper_server.process.poll() is None


BAD_METADATA = [
    ({"group": "a b"}, "group", "a b"),
    ({"group": ""}, "group", "1 to 128"),
    ({"group": "x" * 129}, "group", "1 to 128"),
    ({"group": 7}, "group", "7"),
    ({"branch": 1}, "group", "required"),
    ({"group": "g", "branch": -1}, "branch", "-1"),
    ({"group": "g", "branch": 2, "width": 2}, "branch", "less than"),
    ({"group": "g", "branch": 1.5}, "branch", "1.5"),
    ({"group": "g", "branch": True}, "branch", "True"),
    ({"group": "g", "width": 0}, "width", "from 1"),
    ({"group": "g", "width": 10**9}, "width", "4096"),
    ({"group": "g", "depth": -3}, "depth", "-3"),
    ({"group": "g", "tpot_slo_ms": -5}, "tpot_slo_ms", "-5"),
    ({"group": "g", "ttft_slo_ms": 0}, "ttft_slo_ms", "above 0"),
    ({"group": "g", "priority": "high"}, "priority", "high"),
    ({"group": "g", "nested": {"a": {"b": 1}}}, "nested", "known keys"),
    ("not an object", "taper", "object"),
    ([1, 2], "taper", "object"),
]


def bad_body(meta: Any, **extra: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4, "custom_params": {"taper": meta}}
    return {"text": "Hello", "sampling_params": sampling, **extra}


@pytest.mark.parametrize(("meta", "field", "shown"), BAD_METADATA)
def test_bad_metadata_is_a_400_that_names_field_and_value(
    taper_server: Server, meta: Any, field: str, shown: str
) -> None:
    for stream in (False, True):
        answer = taper_server.post("/generate", bad_body(meta, stream=stream))
        assert answer.status_code == 400, answer.text
        assert field in answer.text
        assert shown in answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_metadata_is_a_400_on_the_openai_routes(
    taper_server: Server, path: str, stream: bool
) -> None:
    body: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 4,
        "stream": stream,
        "custom_params": {"taper": {"group": "g", "tpot_slo_ms": -1}},
    }
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello"
    answer = taper_server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "tpot_slo_ms=-1" in answer.text


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["-1", "soon", "nan", "inf"])
def test_a_bad_slo_header_is_a_400(
    taper_server: Server, header: str, value: str
) -> None:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
    answer = taper_server.post("/generate", body, headers={header: value})
    assert answer.status_code == 400
    assert header in answer.text
    assert value in answer.text


def test_siblings_are_unharmed_by_a_bad_one(taper_server: Server) -> None:
    good = [branch_request(STORY, "good", i, 3) for i in range(3)]
    alone = outputs(run_all(taper_server, good))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_all, taper_server, good)
        bad = branch_request(STORY, "good", 3, 3)
        assert taper_server.post("/generate", bad).status_code == 400
        assert outputs(running.result()) == alone


def test_two_clients_may_use_the_same_group_id(taper_server: Server) -> None:
    mine = [branch_request(STORY, "same", i, 2) for i in range(2)]
    yours = [branch_request("Something else.", "same", i, 2) for i in range(2)]
    together = outputs(run_all(taper_server, [*mine, *yours]))
    taper_server.flush()
    assert outputs(run_all(taper_server, mine)) == together[:2]


def open_stream(server: Server, body: dict[str, Any]) -> http.Response:
    answer = server.post("/generate", {**body, "stream": True}, stream=True)
    assert answer.status_code == 200
    return answer


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def test_a_disconnect_ends_all_branches_of_the_stream(taper_server: Server) -> None:
    sampling = {"temperature": 0, "n": 4, "max_new_tokens": 4000, "ignore_eos": True}
    stream = open_stream(taper_server, {"text": STORY, "sampling_params": sampling})
    lines = stream.iter_lines()
    for _ in range(6):
        next(lines)
    stream.close()
    wait_for(lambda: taper_server.state()["num_running"] == 0)


def start_branches(server: Server, pool: Any, rids: list[str], group: str) -> list[Any]:
    """Long branches under policy `off`, all in the decode batch."""
    bodies = [
        branch_request(STORY, group, i, len(rids), **LONG) | {"rid": rid}
        for i, rid in enumerate(rids)
    ]
    running = [pool.submit(server.generate, body) for body in bodies]
    wait_for(lambda: server.state()["num_running"] == len(rids))
    return running


def abort(server: Server, **body: Any) -> None:
    assert server.post("/abort_request", body).status_code == 200


def test_an_aborted_deferred_branch_is_gone_within_a_step(
    taper_server: Server,
) -> None:
    """Under `off` twelve branches take turns: most wait long for theirs."""
    rids = [f"deferred-{i}-{uuid.uuid4().hex}" for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        running = start_branches(taper_server, pool, rids, "deferred")
        for victim in rids[:3]:
            before = taper_server.state()["num_running"]
            abort(taper_server, rid=victim)
            # This question reaches the scheduler behind the abort.
            known = taper_server.state()["recent_steps"][-1]["step"]
            wait_for(lambda n=before: taper_server.state()["num_running"] == n - 1)
            steps = taper_server.state()["recent_steps"]
            with_it = [s["step"] for s in steps if s["num_rows"] == before]
            # It is taken out when the step in flight, and under overlap the one
            # after, has its result.
            assert max(with_it) <= known + 2
        abort(taper_server, group="deferred")
        answers = [branch.result() for branch in running]
    assert all(a["meta_info"]["finish_reason"]["type"] == "abort" for a in answers)


def test_abort_takes_exact_ids(taper_server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, ten = start_branches(taper_server, pool, ["r1", "r10"], "exact")
        abort(taper_server, rid="r1")
        assert one.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert ten.result()["meta_info"]["completion_tokens"] == 120


def test_one_call_aborts_a_group_and_nobody_else(taper_server: Server) -> None:
    with ThreadPoolExecutor(5) as pool:
        other = pool.submit(
            taper_server.generate, branch_request(STORY, "other", 0, 1, **LONG)
        )
        wait_for(lambda: taper_server.state()["num_running"] == 1)
        rids = [uuid.uuid4().hex for _ in range(3)]
        bodies = [
            branch_request(STORY, "mine", i, 3, **LONG) | {"rid": rid}
            for i, rid in enumerate(rids)
        ]
        mine = [pool.submit(taper_server.generate, body) for body in bodies]
        wait_for(lambda: taper_server.state()["num_running"] == 4)
        abort(taper_server, group="mine")
        reasons = [m.result()["meta_info"]["finish_reason"]["type"] for m in mine]
        assert reasons == ["abort"] * 3
        assert other.result()["meta_info"]["completion_tokens"] == 120
    assert taper_server.post("/abort_request", {"group": "a b"}).status_code == 400


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.4])
def test_a_group_abort_reaches_samples_that_are_still_on_their_way(
    taper_server: Server, delay_s: float
) -> None:
    group = uuid.uuid4().hex
    body = branch_request(STORY, group, 0, 1, n=4, **LONG)
    body["text"] = [f"{delay_s} {STORY}", f"{delay_s} Another story."]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(taper_server.generate, body)
        wait_for(
            lambda: any(g["group"] == group for g in taper_server.state()["groups"])
        )
        time.sleep(delay_s)
        abort(taper_server, group=group)
        reasons = [a["meta_info"]["finish_reason"]["type"] for a in running.result()]
    assert reasons == ["abort"] * 8


def test_a_pause_is_not_taken_for_prefill(taper_server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = start_branches(taper_server, pool, ["pause-a", "pause-b"], "paused")
        before = taper_server.state()["stall_share"]
        assert taper_server.post("/pause_generation", {"mode": "in_place"}).ok
        time.sleep(3)
        assert taper_server.post("/continue_generation", {}).ok
        answers = [branch.result() for branch in running]
    assert all(a["meta_info"]["completion_tokens"] == 120 for a in answers)
    assert taper_server.state()["stall_share"] <= before + 0.05


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"policy": "fastest"}, "eager"),
        ({"policy": "none"}, "none"),
        ({"cap": 0}, "cap"),
        ({"rho": 2}, "rho"),
        ({"deadline": "tomorrow"}, "schedule"),
        ({"utility": "x"}, "linear"),
        ({"tpot_slo_ms": -1}, "tpot_slo_ms"),
        ({"width": 3}, "width"),
        ({}, ""),
        ([1], ""),
    ],
)
def test_a_bad_policy_change_is_a_400_and_changes_nothing(
    taper_server: Server, body: Any, shown: str
) -> None:
    before = taper_server.state()["params"]
    answer = taper_server.post("/taper/policy", body)
    assert answer.status_code == 400, answer.text
    assert shown in answer.text
    assert taper_server.state()["params"] == before


def test_malformed_json_is_a_400(taper_server: Server) -> None:
    for path in ("/generate", "/taper/policy"):
        answer = http.post(taper_server.url + path, data=b'{"text": ', timeout=30)
        assert answer.status_code == 400, path


def test_a_prompt_larger_than_the_pool_is_refused(taper_server: Server) -> None:
    body = branch_request("word " * 9000, "huge", 0, 1)
    answer = taper_server.post("/generate", body)
    assert answer.status_code == 400, answer.text
