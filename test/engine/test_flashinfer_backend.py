"""The CUDA backend without a GPU: in a process of its own, for Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.slow
def test_decode_steps_are_right_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(FOLDER)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
