"""Every example of docs/fork_api.md, taken from the page and run as a user would."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forking import assert_idle_pool
from pydantic import BaseModel

from server import Server
from sglang_taper.engine.fork_api.schema import (
    Continuation,
    ForkEvent,
    ForkReport,
    ForkRequest,
)

PAGE = Path(__file__).parents[2] / "docs" / "fork_api.md"
EXAMPLES = re.findall(
    r"^```(bash|python|javascript)\n(.*?)^```$", PAGE.read_text(), re.M | re.S
)
PROGRAMS = {"bash": "curl", "javascript": "node", "python": sys.executable}


@pytest.fixture
def server(taper_server: Server) -> Iterator[Server]:
    """The server, idle at both ends."""
    taper_server.set_policy(policy="taper")
    taper_server.flush()
    yield taper_server
    assert_idle_pool(taper_server)


def examples(language: str) -> list[str]:
    return [source for name, source in EXAMPLES if name == language]


def run(server: Server, source: str, language: str) -> str:
    """What the example prints when it is run as it is, but for the address."""
    program = shutil.which(PROGRAMS[language])
    if program is None:
        pytest.skip(f"{PROGRAMS[language]} is not installed on this machine")
    assert "http://127.0.0.1:30000" in source
    source = source.replace("http://127.0.0.1:30000", server.url)
    command = {
        "bash": ["bash", "-euo", "pipefail", "-c", source],
        "python": [program, "-W", "error::SyntaxWarning", "-c", source],
        "javascript": [program, "--input-type=module", "--eval", source],
    }[language]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_an_example_for_every_language() -> None:
    assert {language for language, _ in EXAMPLES} == set(PROGRAMS)
    assert len(EXAMPLES) == len(re.findall(r"^```\w", PAGE.read_text(), re.M))


def test_curl_streams_three_branches(server: Server) -> None:
    stream, _ = examples("bash")
    lines = [line for line in run(server, stream, "bash").splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    *told, summary = [json.loads(line.removeprefix("data: ")) for line in lines]
    ends = [event["branch"] for event in told if event["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert summary["taper"]["num_finished"] == 3


def test_curl_gets_the_first_of_four_samples(server: Server) -> None:
    _, first_k = examples("bash")
    answers = json.loads(run(server, first_k, "bash"))
    ends = [answer["meta_info"]["finish_reason"] for answer in answers]
    assert len(ends) == 4
    assert any(end["type"] != "abort" for end in ends)
    for end in ends:
        assert end["type"] != "abort" or end["message"].startswith("first_k: ")


def test_the_openai_example_prints_what_has_finished(server: Server) -> None:
    source, _ = examples("python")
    *choices, total = run(server, source, "python").strip().splitlines()
    assert re.fullmatch(r"\d+ tokens", total)
    assert any(re.match(r"[0-3] ", line) for line in choices)


def test_the_example_of_our_client_forks_joins_and_forks_again(
    server: Server,
) -> None:
    _, source = examples("python")
    printed = run(server, source, "python")
    for branch in ("0", "1", "2", "None"):
        assert f"branch {branch} {{'type'" in printed
    last = printed.strip().splitlines()[-1]
    assert re.fullmatch(r"\[.*\] [12]", last), last


def test_the_javascript_example_reads_the_stream(server: Server) -> None:
    (source,) = examples("javascript")
    printed = run(server, source, "javascript").splitlines()
    assert re.fullmatch(r"tokens: \d+", printed[0])
    assert [line[:2] for line in printed if re.match(r"[01] ", line)] == ["0 ", "1 "]


@pytest.mark.parametrize("model", [ForkRequest, Continuation, ForkEvent, ForkReport])
def test_the_page_explains_every_key(model: type[BaseModel]) -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.M | re.S)
    assert set(model.model_fields) <= set(re.findall(r"`([^`\n]+)`", prose))
