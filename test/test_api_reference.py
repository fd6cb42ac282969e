"""The API reference is what its generator prints from the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen", DOCS / "api_reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_is_what_the_code_says(generator: ModuleType) -> None:
    assert (DOCS / "api.md").read_text() == generator.page()


@pytest.mark.slow
def test_every_route_of_ours_is_on_the_page(generator: ModuleType) -> None:
    found = [f"{m} {p}" for p, m, _ in generator.our_operations()]
    assert {"get /taper/state", "post /taper/policy"} <= set(found)


def test_every_command_is_on_the_page(generator: ModuleType) -> None:
    text = "\n".join(generator.commands())
    for name in ("check", "demo", "simulate", "calibrate"):
        assert f"## `sglang-taper {name}`" in text
    assert "`--policies`" in text
    assert "%(default)" not in text


def test_what_is_accepted_comes_from_the_checks(generator: ModuleType) -> None:
    rows = "\n".join([*generator.metadata(), *generator.changes()])
    assert "| `branch` | `0` | an integer from 0 to 4095 |" in rows
    assert "| `x-taper-front-end` | `front_end` |" in rows
    assert "| `rho` | `None` | at least 0 and at most 1 |" in rows
    assert "| `cap` | `2` | at least 1 and at most 4096 |" in rows
    assert "| `policy` | `taper` | one of cap, eager, " in rows


def test_cells_hold_on_one_line(generator: ModuleType) -> None:
    assert generator.cell("a |\n b") == "a \\| b"
    assert list(generator.table(("x",), ("y",))) == ["| x |", "| --- |", "| y |", ""]
