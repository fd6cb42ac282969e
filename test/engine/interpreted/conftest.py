"""Tests that need Triton's interpreter: see test/ops/interpreted/conftest.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

OPS = Path(__file__).parents[2] / "ops"
sys.path[:0] = [str(OPS), str(OPS / "interpreted")]

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*"]
