"""The control routes, against a manager that records what it would send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import io_struct
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware
from sglang.utils import TypeBasedDispatcher

from sglang_taper.changes import updated_params
from sglang_taper.engine import routes
from sglang_taper.engine.messages import TaperControlReq, TaperControlReqOutput
from sglang_taper.errors import FieldError, HookError
from sglang_taper.policy.types import PolicyParams


class Manager:
    """Stands for the tokenizer manager; `answers` are the schedulers'."""

    def __init__(self) -> None:
        self.asked: list[TaperControlReq] = []
        self.aborted: list[tuple[str, bool]] = []
        self.answers = [TaperControlReqOutput(state={"policy": "taper"})]

    def auto_create_handle_loop(self) -> None: ...

    async def taper_communicator(self, request: Any) -> list[TaperControlReqOutput]:
        self.asked.append(request)
        return self.answers

    def abort_request(self, rid: str, abort_all: bool) -> None:
        self.aborted.append((rid, abort_all))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    manager = Manager()
    state = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(http_server, "_global_state", state)
    keys = SimpleNamespace(admin_api_key=None)
    monkeypatch.setattr(routes, "get_serving", lambda: keys)
    return manager


def make_app() -> FastAPI:
    app = FastAPI()
    app.router.route_class = http_server.ORJSONRoute
    app.add_api_route("/abort_request", http_server.abort_request, methods=["POST"])
    handler = http_server.validation_exception_handler
    app.add_exception_handler(http_server.RequestValidationError, handler)
    routes.install_routes(app)
    return app


@pytest.fixture
def client(manager: Manager) -> Iterator[TestClient]:
    with TestClient(make_app()) as client:
        yield client


def test_state_is_the_schedulers(client: TestClient, manager: Manager) -> None:
    answer = client.get("/taper/state")
    assert (answer.status_code, answer.json()) == (200, {"policy": "taper"})
    assert [(r.action, r.params) for r in manager.asked] == [("state", {})]


def test_state_of_several_data_parallel_ranks_is_listed(
    client: TestClient, manager: Manager
) -> None:
    manager.answers = [TaperControlReqOutput(state={"dp_rank": i}) for i in (1, 0)]
    ranks = [{"dp_rank": 0}, {"dp_rank": 1}]
    assert client.get("/taper/state").json() == {"dp_ranks": ranks}


def test_policy_changes_are_sent_and_answered_with_the_state(
    client: TestClient, manager: Manager
) -> None:
    changes = {"policy": "cap", "cap": 3, "rho": None, "tpot_slo_ms": 20}
    answer = client.post("/taper/policy", json=changes)
    assert (answer.status_code, answer.json()) == (200, {"policy": "taper"})
    assert [(r.action, r.params) for r in manager.asked] == [("policy", changes)]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("", ["body=", "a JSON object"]),
        ("[1]", ["body=[1]", "a JSON object"]),
        ("{}", ["at least one of policy, cap"]),
        ('{"width": 2}', ["width=2", "known: policy, cap"]),
        ('{"cap": 0}', ["cap=0", "at least 1 and at most 4096"]),
        ('{"cap": 2.5}', ["cap=2.5", "an integer"]),
        ('{"cap": true}', ["cap=True", "an integer"]),
        ('{"cap": null}', ["cap=None", "an integer"]),
        ('{"rho": "0.3"}', ["rho='0.3'", "a number"]),
        ('{"rho": 1.5}', ["rho=1.5", "at least 0 and at most 1"]),
        ('{"tpot_slo_ms": 0}', ["tpot_slo_ms=0", "above 0"]),
        ('{"deadline": "soon"}', ["deadline='soon'", "schedule, progress"]),
        ('{"utility": 1}', ["utility=1", "a string"]),
        ('{"policy": "none"}', ["policy='none'", "start-up"]),
        ('{"policy": "fast"}', ["policy='fast'", "one of cap, eager"]),
    ],
)
def test_a_bad_policy_change_is_a_400_and_is_not_sent(
    client: TestClient, manager: Manager, body: str, parts: list[str]
) -> None:
    answer = client.post("/taper/policy", content=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert all(part in message for part in parts), message
    assert manager.asked == []


def test_a_change_the_scheduler_refuses_is_a_409_with_its_sentence(
    client: TestClient, manager: Manager
) -> None:
    manager.answers = [TaperControlReqOutput(error="not now")] * 2
    answer = client.post("/taper/policy", json={"cap": 2})
    assert answer.status_code == 409
    assert answer.json() == {"error": {"message": "not now"}}


def test_abort_by_group_asks_the_schedulers(
    client: TestClient, manager: Manager
) -> None:
    answer = client.post("/abort_request", json={"group": "g"})
    assert (answer.status_code, answer.content) == (200, b"")
    (asked,) = manager.asked
    assert (asked.action, asked.params["group"]) == ("abort_group", "g")
    assert asked.params["now_ms"] > 0
    assert manager.aborted == []


def test_abort_of_a_subtree_asks_the_schedulers_for_its_root(
    client: TestClient, manager: Manager
) -> None:
    answer = client.post("/abort_request", json={"group": "g", "parent": "rid/1"})
    assert (answer.status_code, answer.content) == (200, b"")
    (asked,) = manager.asked
    assert asked.action == "abort_group"
    assert asked.params.pop("now_ms") > 0
    assert asked.params == {"group": "g", "parent": "rid/1"}


def test_a_parent_that_is_null_aborts_the_whole_group(
    client: TestClient, manager: Manager
) -> None:
    body = {"group": "g", "parent": None}
    assert client.post("/abort_request", json=body).status_code == 200
    assert "parent" not in manager.asked[0].params


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"group": "g", "parent": ""}, ["body.parent=''", "1 to 256 characters"]),
        ({"group": "g", "parent": 7}, ["body.parent=7", "1 to 256 characters"]),
        ({"group": "g", "parent": "x" * 257}, ["body.parent=", "1 to 256 characters"]),
        ({"group": "g", "parent": ["r"]}, ["body.parent=['r']", "request id"]),
        ({"parent": "r"}, ["body.group=None", "required"]),
        ({"group": None, "parent": "r"}, ["body.group=None", "required"]),
        ({"rid": "r", "parent": "r"}, ["body.group=None", "required"]),
        ({"group": "g", "parent": "r", "rid": "r"}, ["body.group='g'", "without rid"]),
        ({"group": "g", "parent": "r", "abort_all": True}, ["body.group", "abort_all"]),
    ],
)
def test_abort_of_a_bad_subtree_is_a_400_and_aborts_nothing(
    client: TestClient, manager: Manager, body: dict[str, Any], parts: list[str]
) -> None:
    answer = client.post("/abort_request", json=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert all(part in message for part in parts), message
    assert manager.asked == manager.aborted == []


@pytest.mark.parametrize(
    ("body", "aborted"),
    [
        ({"rid": "r"}, ("r", False)),
        ({"abort_all": True}, ("", True)),
        ({"rid": "r", "group": None}, ("r", False)),
    ],
)
def test_abort_by_request_id_is_stock(
    client: TestClient, manager: Manager, body: dict[str, Any], aborted: Any
) -> None:
    assert client.post("/abort_request", json=body).status_code == 200
    assert manager.aborted == [aborted]
    assert manager.asked == []


@pytest.mark.parametrize(
    "body", [{"group": ""}, {"group": 3}, {"group": "a b"}, {"group": "g", "rid": "r"}]
)
def test_abort_of_a_bad_group_is_a_400(
    client: TestClient, manager: Manager, body: dict[str, Any]
) -> None:
    answer = client.post("/abort_request", json=body)
    assert answer.status_code == 400
    assert "body.group" in answer.json()["error"]["message"]
    assert manager.asked == manager.aborted == []


def test_an_abort_body_that_is_not_json_is_refused_as_stock_does(
    client: TestClient,
) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/abort_request", content="{", headers=headers)
    assert answer.status_code == 400


def test_a_caller_with_a_credential_aborts_groups_of_its_own_only(
    client: TestClient, manager: Manager
) -> None:
    for key in ("Bearer mine", "bearer mine", "Bearer yours"):
        headers = {"Authorization": key}
        client.post("/abort_request", json={"group": "g"}, headers=headers)
    mine, again, yours = (asked.params["scope"] for asked in manager.asked)
    assert mine == again != yours
    assert "mine" not in mine


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer admin"}])
def test_the_operator_aborts_groups_of_everybody(
    client: TestClient,
    manager: Manager,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
) -> None:
    keys = SimpleNamespace(admin_api_key="admin" if headers else None)
    monkeypatch.setattr(routes, "get_serving", lambda: keys)
    client.post("/abort_request", json={"group": "g"}, headers=headers)
    assert "scope" not in manager.asked[0].params


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/taper/state"), ("POST", "/taper/policy"), ("POST", "/abort_request")],
)
def test_control_routes_need_the_admin_key_where_there_is_one(
    manager: Manager, method: str, path: str
) -> None:
    app = make_app()
    add_api_key_middleware(app, api_key="user", admin_api_key="admin")
    client = TestClient(app)
    body = {"group": "g"} if path == "/abort_request" else {"cap": 2}

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return client.request(method, path, json=body, headers=headers).status_code

    assert [status("user"), status("admin")] == [401, 200]


def test_a_fork_needs_the_key_that_generate_needs(manager: Manager) -> None:
    app = make_app()
    add_api_key_middleware(app, api_key="user", admin_api_key="admin")
    client = TestClient(app)

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return client.post("/fork", json={}, headers=headers).status_code

    # With the right one it comes as far as its body, which is not acceptable.
    assert [status("other"), status("admin"), status("user")] == [401, 401, 400]


def test_installing_twice_adds_nothing() -> None:
    app = make_app()
    before = len(app.router.routes)
    routes.install_routes(app)
    assert len(app.router.routes) == before


def test_an_app_without_the_abort_route_is_an_error() -> None:
    with pytest.raises(HookError, match="/abort_request"):
        routes.install_routes(FastAPI())


def test_the_control_channel_sends_a_request_and_collects_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    manager = SimpleNamespace(
        _dispatch_to_scheduler=sent.append, _result_dispatcher=TypeBasedDispatcher([])
    )
    parallel = SimpleNamespace(num_dp_ranks=2)
    monkeypatch.setattr(routes, "get_parallel", lambda: parallel)
    routes.attach_control_hook(None, manager)

    async def round_trip() -> list[TaperControlReqOutput]:
        asking = asyncio.create_task(manager.taper_communicator(TaperControlReq()))
        await asyncio.sleep(0)
        for rank in range(2):
            manager._result_dispatcher(TaperControlReqOutput(state={"rank": rank}))
        return await asking

    answers = asyncio.run(round_trip())
    assert [answer.state["rank"] for answer in answers] == [0, 1]
    assert sent == [TaperControlReq()]


def test_the_routes_fit_sglangs_own_app() -> None:
    routes.install_routes(http_server.app)
    levels = {
        r.path: getattr(r.endpoint, "_auth_level", None)
        for r in http_server.app.router.routes
        if getattr(r, "path", "").startswith(("/taper", "/abort"))
    }
    admin = AuthLevel.ADMIN_OPTIONAL
    paths = ("/abort_request", "/taper/state", "/taper/policy", "/taper/live")
    guarded = dict.fromkeys((*paths, "/taper/requests/{id:path}"), admin)
    assert levels == guarded | {"/taper/": None}


@pytest.mark.parametrize(
    "message",
    [
        TaperControlReq(action="policy", params={"cap": 2, "rho": None}),
        TaperControlReqOutput(error="no", state={"groups": [{"rows": [1, 2]}]}),
    ],
)
def test_control_messages_survive_both_kinds_of_ipc(message: Any) -> None:
    message.http_worker_ipc = "ipc://worker"
    data = io_struct.msgpack_encode(message)
    assert io_struct.msgpack_decode(data) == message
    assert io_struct.pickle.loads(io_struct.pickle.dumps(message)) == message


def test_messages_do_not_share_their_default_dict() -> None:
    TaperControlReq().params["cap"] = 2
    assert TaperControlReq().params == {}


def test_updated_parameters_keep_what_was_not_named() -> None:
    params = PolicyParams(policy="taper", cap=5, rho=0.5)
    changed = updated_params(params, {"rho": None, "ttft_slo_ms": 10})
    assert changed == msgspec.structs.replace(params, rho=None, ttft_slo_ms=10.0)
    assert isinstance(changed.ttft_slo_ms, float)


def test_a_nan_parameter_is_refused() -> None:
    with pytest.raises(FieldError, match="rho=nan"):
        updated_params(PolicyParams(), {"rho": float("nan")})
