"""`sglang-taper explain` against a server that tells a fixed story."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest

from sglang_taper import cli
from sglang_taper.explain import KEY_VARIABLES, bar, ms, text_of, why


def span(status: str, from_ms: float, to_ms: float, **more: Any) -> dict[str, Any]:
    return {"status": status, "from_ms": from_ms, "to_ms": to_ms, **more}


DEFERRAL = {
    **{"from_step": 7, "to_step": 9, "reason": "budget", "budget_ms": 21.0},
    **{"urgent": "other", "urgent_slack_ms": -3.0},
}
SPANS = [
    span("queued", 0, 10),
    span("prefill", 10, 20),
    span("running", 20, 50),
    span("deferred", 50, 80, **DEFERRAL),
    span("running", 80, 100, from_step=10, to_step=None),
]
BRANCH = {
    **{"rid": "r-1", "branch": 1, "width": 3, "depth": 1, "status": "running"},
    **{"finish": None, "output_tokens": 6, "steps_run": 6, "steps_deferred": 3},
    **{"num_spans_forgotten": 2, "spans": SPANS},
}
FORK = {
    **{"width": 3, "opened_ms": 5.0, "ended_ms": 90.0, "num_ended": 3},
    **{"joined_by": "r-9", "joined_ms": 95.0},
}
STORY = {
    "request": {
        **{"id": "g/1", "num_tokens": 18, "ttft_ms": 20.0, "tpot_ms": 15.0},
        **{"ttft_slo_ms": 2000.0, "tpot_slo_ms": 20.0, "deadline_misses": 1},
    },
    "branches": [BRANCH],
    "forks": [FORK],
}


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        key = self.headers["Authorization"]
        self.asked.append((self.path, key))
        if key == "Bearer wrong":
            self._answer(401, {"error": "Unauthorized"})
        elif unquote(self.path) == "/taper/requests/g/1":
            self._answer(200, STORY)
        elif self.path.startswith("/taper/requests/"):
            self._answer(404, {"error": {"message": "unknown"}})
        else:
            self._answer(404, {"detail": "Not Found"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for variable in KEY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_story_is_a_summary_a_chart_and_the_spans_with_their_reasons(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "g/1", "--base-url", url]) == 0
    out = capsys.readouterr().out
    assert "request g/1: 1 branches, 18 tokens; TTFT 20.0 ms of 2000.0 ms" in out
    assert "fork of 3 at 5.0 ms, over at 90.0 ms, joined by r-9 at 95.0 ms" in out
    assert "2/3 r-1: running, 6 tokens, ran in 6 steps, left out of 3" in out
    assert "2 earlier spans are forgotten" in out
    assert "the step's time budget was used up (21.0 ms); most urgent other" in out
    assert "7-9" in out
    assert Handler.asked == [("/taper/requests/g%2F1", None)]


def test_json_is_what_the_server_told(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "g/1", "--base-url", url + "/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STORY


def test_an_unknown_id_ends_with_code_1_and_says_so(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "nobody", "--base-url", url]) == 1
    assert "'nobody'" in capsys.readouterr().err


def test_a_key_is_taken_from_the_flag_or_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    cli.main(["explain", "g/1", "--base-url", url, "--json"])
    cli.main(["explain", "g/1", "--base-url", url, "--json", "--api-key", "given"])
    assert [key for _, key in Handler.asked] == [
        *("Bearer from-environment", "Bearer given")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key", "wrong"], "--api-key"),
        (["--base-url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--base-url", "nonsense"], "nonsense"),
    ],
)
def test_a_server_that_does_not_answer_ends_with_code_2(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.main(["explain", "g/1", "--base-url", url, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_server_without_our_routes_is_not_an_unknown_id(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "x", "--base-url", url + "/elsewhere"]) == 2
    assert "404" in capsys.readouterr().err


def test_a_character_of_the_chart_is_the_status_of_most_of_its_time() -> None:
    assert bar(SPANS, 100.0, 20) == "..PP======######===="
    assert bar(SPANS, 200.0, 10) == ".==#="
    assert bar([], 100.0, 10) == ""


def test_the_chart_is_as_wide_as_the_terminal_within_limits() -> None:
    for columns, width in ((10, 20), (80, 65), (1000, 120)):
        line = next(line for line in text_of(STORY, columns) if "..P" in line)
        assert len(line) == 14 + width


def test_a_span_that_nothing_bound_has_no_reason() -> None:
    assert why(SPANS[2]) == ""
    cap = {"reason": "cap", "budget_ms": None, "urgent": None}
    assert why(cap) == "its request runs as many branches as the cap allows"


def test_times_are_read_at_a_glance() -> None:
    assert [ms(None), ms(1.25), ms(12_345.0)] == ["-", "1.2 ms", "12.3 s"]
