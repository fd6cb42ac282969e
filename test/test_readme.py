"""The README: short, and its commands and its arithmetic are right."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
TEST_COMMAND = "python3 python/sglang_taper/bootstrap.py test"


def test_the_readme_is_short_and_prints_both_commands() -> None:
    assert len(README.splitlines()) < 120
    commands = re.findall(r"^```bash\n(.*)\n```$", README, re.M)
    assert TEST_COMMAND in commands
    assert TEST_COMMAND.removesuffix("test") + "demo" in commands


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    lines = [line.strip() for line in script.splitlines()]
    assert f'step "tests" {TEST_COMMAND}' in lines
    assert "set -euo pipefail" in lines


def test_the_worked_example_of_the_readme_adds_up() -> None:
    rows = re.findall(r"^\| `(?:off|eager|taper)`.*$", README, re.M)
    serial, forks, target_ms = 12, 4, 20
    for row, width in zip(rows, (1, 6, 4), strict=True):
        num_rows = serial + forks * width
        step_ms = 6 + 0.5 * num_rows
        good_rows = num_rows if step_ms <= target_ms else forks * width
        cells = [cell.strip(" *") for cell in row.split("|")[2:-1]]
        assert cells[:2] == [str(num_rows), f"{step_ms:g} ms"]
        assert cells[4:] == [f"{1000 * n / step_ms:.0f}" for n in (num_rows, good_rows)]
