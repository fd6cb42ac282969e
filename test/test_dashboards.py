"""The Grafana dashboard and the alerts name metrics that a server exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from server import Server

DOCKER = Path(__file__).parents[1] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "sglang_taper.json").read_text())
ALERTS_FILE = DOCKER / "prometheus" / "alerts.yml"
ALERTS = yaml.safe_load(ALERTS_FILE.read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
METRIC = re.compile(r"\bsglang(?:_taper)?:\w+")
HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")


def panels() -> list[dict[str, Any]]:
    return list(DASHBOARD["panels"])


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in RULES)
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_every_panel_has_a_place_of_its_own_and_says_what_it_shows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


def test_every_alert_has_a_severity_a_summary_and_a_duration() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)


def test_brackets_of_every_expression_match() -> None:
    pairs = {")": "(", "]": "[", "}": "{"}
    for expression in expressions():
        opened: list[str] = []
        for character in re.sub(r'"[^"]*"', "", expression):
            if character in pairs.values():
                opened.append(character)
            elif character in pairs:
                assert opened, expression
                assert opened.pop() == pairs[character], expression
        assert opened == [], expression


def test_a_total_is_only_read_as_a_rate() -> None:
    for expression in expressions():
        for name in re.findall(r"[\w:]+_total", expression):
            inside = rf"rate\({re.escape(name)}(\{{[^}}]*\}})?\["
            assert re.search(inside, expression), expression


def test_prometheus_takes_the_alerts_and_the_expressions(tmp_path: Path) -> None:
    """Of the dashboard, with Grafana's variables filled in."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    filled = tmp_path / "dashboard.yml"
    rules = [
        {"record": f"panel:{i}", "expr": e.replace("$__rate_interval", "1m")}
        for i, e in enumerate(expressions())
        if "label_values" not in e
    ]
    filled.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for file in (ALERTS_FILE, filled):
        done = subprocess.run(
            [promtool, "check", "rules", str(file)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_every_metric_they_name_is_exported_by_a_server(taper_server: Server) -> None:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}, "stream": True}
    # SGLang measures the time between tokens of streams only.
    assert taper_server.post("/generate", body).status_code == 200
    text = taper_server.get("/metrics").text
    exported = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    exported |= set(re.findall(r"^([\w:]+)(?:\{| )", text, re.M))
    named = {name for e in expressions() for name in METRIC.findall(e)}
    assert len(named) > 25
    assert {name for name in named if name.startswith("sglang:")}
    assert named - exported == set()
