"""Every benchmark command starts: its imports and flags are in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmark"
# Modules of the other scripts, not commands.
PARTS = {"branch_step.py", "deferring_step.py"}
COMMANDS = sorted(
    path.name for path in BENCHMARKS.glob("*.py") if path.name not in PARTS
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_explains_itself(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / name), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
