"""The page and its routes, against schedulers that answer what they are told to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.utils import auth
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_taper.engine import page, watch
from sglang_taper.engine.messages import TaperControlReqOutput


class Manager:
    """Stands for the tokenizer manager; `answers` are the schedulers'."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers = [TaperControlReqOutput(state={"step": 3})]

    def auto_create_handle_loop(self) -> None: ...

    async def taper_communicator(self, request: Any) -> list[TaperControlReqOutput]:
        self.asked.append((request.action, request.params))
        return self.answers


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    manager = Manager()
    state = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(http_server, "_global_state", state)
    return manager


@pytest.fixture
def app(manager: Manager) -> FastAPI:
    app = FastAPI()
    watch.add_watch_routes(app)
    return app


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


def test_the_live_view_asks_for_what_came_after_the_last_step(
    client: TestClient, manager: Manager
) -> None:
    answer = client.get("/taper/live?after_step=41")
    assert (answer.status_code, answer.json()) == (200, {"step": 3})
    client.get("/taper/live")
    assert manager.asked == [("live", {"after_step": 41}), ("live", {"after_step": 0})]


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "", "9" * 30, "9" * 5000, "%C2%B2"])
def test_a_bad_step_is_a_400_with_its_range(
    client: TestClient, manager: Manager, text: str
) -> None:
    answer = client.get(f"/taper/live?after_step={text}")
    assert answer.status_code == 400
    assert "an integer from 0 to" in answer.json()["error"]["message"]
    assert manager.asked == []


def test_several_ranks_are_listed_in_the_order_of_their_numbers(
    client: TestClient, manager: Manager
) -> None:
    manager.answers = [TaperControlReqOutput(state={"dp_rank": i}) for i in (1, 0)]
    ranks = client.get("/taper/live").json()["dp_ranks"]
    assert [rank["dp_rank"] for rank in ranks] == [0, 1]


@pytest.mark.parametrize("id", ["g-1", "rid/1", "a b", "ä:1"])
def test_a_request_is_asked_for_by_its_whole_id(
    client: TestClient, manager: Manager, id: str
) -> None:
    assert client.get(f"/taper/requests/{id}").status_code == 200
    assert manager.asked == [("explain", {"id": id})]


def test_an_unknown_request_is_a_404_that_says_what_that_means(
    client: TestClient, manager: Manager
) -> None:
    manager.answers = [TaperControlReqOutput(state={})] * 2
    answer = client.get("/taper/requests/gone")
    assert answer.status_code == 404
    assert "'gone'" in answer.json()["error"]["message"]
    assert "forgotten" in answer.json()["error"]["message"]


def test_only_the_rank_that_knows_a_request_tells_of_it(
    client: TestClient, manager: Manager
) -> None:
    manager.answers = [
        TaperControlReqOutput(state={}),
        TaperControlReqOutput(state={"id": "g"}),
    ]
    assert client.get("/taper/requests/g").json() == {"id": "g"}


@pytest.fixture(params=["user", "admin"])
def guarded(request: pytest.FixtureRequest, app: FastAPI) -> TestClient:
    """The app as SGLang guards it, with the hook behind its own function."""
    admin = "admin" if request.param == "admin" else None
    add_api_key_middleware(app, api_key="user", admin_api_key=admin)
    watch.page_without_key_hook(None, app, api_key="user", admin_api_key=admin)
    app.state.key = request.param
    return TestClient(app)


def test_the_page_opens_without_the_key_and_its_data_does_not(
    guarded: TestClient, app: FastAPI, manager: Manager
) -> None:
    assert guarded.get("/taper/").text == page.html()
    assert guarded.get("/taper", follow_redirects=False).status_code == 307
    for path in ("/taper/live", "/taper/requests/g", "/taper//", "/taper/x"):
        assert guarded.get(path).status_code == 401, path
    assert guarded.post("/taper/").status_code == 401
    assert manager.asked == []
    headers = {"Authorization": f"Bearer {app.state.key}"}
    for path in ("/taper/live", "/taper/requests/g"):
        assert guarded.get(path, headers=headers).status_code == 200


def test_the_page_opens_below_a_root_path_too(app: FastAPI, manager: Manager) -> None:
    app.root_path = "/api"
    add_api_key_middleware(app, api_key="user", admin_api_key=None)
    watch.page_without_key_hook(None, app)
    client = TestClient(app, root_path="/api")
    assert client.get("/api/taper/").text == page.html()
    assert client.get("/api/taper/live").status_code == 401


def test_the_hook_is_on_the_function_that_adds_the_check_of_keys() -> None:
    assert callable(auth.add_api_key_middleware)
    app = FastAPI()
    watch.page_without_key_hook(None, app)
    assert [m.cls for m in app.user_middleware] == [watch.PageWithoutKey]


def test_the_page_forbids_everything_that_is_not_in_it(client: TestClient) -> None:
    answer = client.get("/taper/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["content-type"].startswith("text/html")


def test_the_policy_names_the_very_style_and_script_of_the_page() -> None:
    html = page.html()
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.S)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    policy = page.headers()["Content-Security-Policy"]
    assert f"style-src '{page._digest(style)}'" in policy
    assert f"script-src '{page._digest(script)}'" in policy


def test_the_page_names_no_other_place() -> None:
    text = page.html().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(|src=|\bimport\b", text)
