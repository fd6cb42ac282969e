"""A server with a key and with tracing: the page asks for the key, each branch is a
span."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from page_browser import chromium, open_page, require_browser, text, wait_for
from workload import STORY, branch_request

from server import Server, free_port, running_server
from sglang_taper import cli

KEY = "a key of the tests"
WIDTH = 3
COEFFICIENTS = ("a_ms", "b_ms_per_row", "c_ms_per_token")


def has_tracing() -> bool:
    return importlib.util.find_spec("opentelemetry.sdk") is not None


@pytest.fixture(scope="module")
def collector() -> Iterator[Any]:
    """SGLang's own receiver of OpenTelemetry spans; None without OpenTelemetry."""
    if not has_tracing():
        yield None
        return
    from sglang.test.otel_collector import LightweightOtlpCollector

    collector = LightweightOtlpCollector(port=free_port())
    collector.start()
    yield collector
    collector.stop()


@pytest.fixture(scope="module")
def guarded_server(
    collector: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    profile = tmp_path_factory.mktemp("guarded") / "profile.json"
    profile.write_text(json.dumps(dict.fromkeys(COEFFICIENTS, 1.0)))
    flags = ["--api-key", KEY, "--branch-policy", "off"]
    flags += ["--latency-profile", str(profile)]
    if collector is not None:
        endpoint = f"127.0.0.1:{collector.port}"
        flags += ["--enable-trace", "--otlp-traces-endpoint", endpoint]
    env = {"SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "200"}
    with running_server(*flags, env=env) as server:
        yield server


@pytest.fixture(scope="module")
def fork(guarded_server: Server) -> str:
    """The group of a fork that has run."""
    texts = [f"{STORY} {i}." for i in range(WIDTH)]
    bodies = [branch_request(t, "traced", i, WIDTH) for i, t in enumerate(texts)]
    body = {
        "text": texts,
        "rid": [f"traced/{i}" for i in range(WIDTH)],
        "sampling_params": [
            b["sampling_params"] | {"ignore_eos": True} for b in bodies
        ],
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = guarded_server.post("/generate", body, headers=headers)
    assert answer.status_code == 200, answer.text
    return "traced"


def test_nothing_but_the_page_is_told_without_the_key(guarded_server: Server) -> None:
    assert "<!doctype html>" in guarded_server.get("/taper/").text
    for path in ("live", "requests/traced", "state"):
        assert guarded_server.get(f"/taper/{path}").status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    url = guarded_server.url + "/taper/live"
    assert requests.get(url, headers=headers, timeout=60).status_code == 200


def test_the_command_needs_the_key(
    guarded_server: Server, fork: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", fork, "--base-url", guarded_server.url]
    assert cli.main(command) == 2
    assert "--api-key" in capsys.readouterr().err
    assert cli.main([*command, "--api-key", KEY]) == 0
    assert "request traced" in capsys.readouterr().out


def test_the_page_asks_for_the_key_and_then_shows(guarded_server: Server) -> None:
    require_browser()
    with chromium() as browser:
        browser.get(guarded_server.url + "/taper/")
        form = browser.find_element("id", "key-form")
        wait_for(form.is_displayed, "the page asks for a key")
        field = browser.switch_to.active_element
        assert field.get_attribute("id") == "key"
        field.send_keys("another\n")
        wait_for(lambda: "does not take" in text(browser, "key-wrong"))
        assert not browser.find_element("id", "view").is_displayed()
        browser.switch_to.active_element.send_keys(KEY + "\n")
        wait_for(lambda: text(browser, "connection") == "live")
        assert browser.find_element("id", "view").is_displayed()
        open_page(browser, guarded_server.url)


def test_each_branch_is_a_span_below_its_request(
    guarded_server: Server, collector: Any, fork: str
) -> None:
    if collector is None:
        pytest.skip("needs OpenTelemetry, of the extra `test`")
    spans = wait_for(lambda: our_spans(collector), "three spans have come")
    assert sorted(facts(span)["taper.branch"] for span, _ in spans) == [0, 1, 2]
    for span, root in spans:
        told = facts(span)
        assert told["taper.group"] == "traced"
        assert told["taper.width"] == WIDTH
        assert told["taper.steps_run"] > 0
        assert told["taper.finish"] == "length"
        rid = f"traced/{told['taper.branch']}"
        assert facts(root)["rid"] == rid
        assert root.start_time_ns <= span.start_time_ns < span.end_time_ns
    deferred = [span for span, _ in spans if facts(span)["taper.steps_deferred"]]
    assert len(deferred) >= WIDTH - 1
    for span in deferred:
        events = [e for e in span.events if e["name"] == "deferred"]
        assert events


def facts(span: Any) -> dict[str, Any]:
    """Its attributes, which the receiver has as the protocol sends them."""
    return {a["key"]: next(iter(a["value"].values())) for a in span.attributes}


def our_spans(collector: Any) -> list[tuple[Any, Any]] | None:
    """Ours, each with the root of its trace, once all of them have come."""
    by_id = {s.span_id: s for s in collector.get_spans()}
    ours = [s for s in by_id.values() if s.name == "taper_branch"]
    threads = [by_id.get(s.parent_span_id) for s in ours]
    roots = [by_id.get(t.parent_span_id) if t else None for t in threads]
    return (
        list(zip(ours, roots, strict=True))
        if len(ours) == WIDTH and all(roots)
        else None
    )
