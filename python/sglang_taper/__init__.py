"""Branch parallelism under a slack budget (TAPER) on top of SGLang.

Importing this package imports neither torch nor sglang.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["RuntimeEndpoint", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "RuntimeEndpoint":
        from sglang_taper.frontend.endpoint import RuntimeEndpoint

        return RuntimeEndpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
