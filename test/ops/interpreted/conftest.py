"""Tests that need Triton's interpreter, which must be chosen before triton is imported.

`test_kernels.py` runs them in a process of their own; here they are not collected
without the variable, since the kernels would be compiled for a GPU instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*"]
