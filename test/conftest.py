"""Shared fixtures. Servers are started once per session and used by many tests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from server import EXACT, Server, running_server

# The same examples everywhere; how fast they run is the machine's affair.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def taper_server() -> Iterator[Server]:
    """Overlap scheduling on, strict memory checks at every step."""
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    flags = (*EXACT, "--enable-metrics", "--enable-custom-logit-processor")
    with running_server(*flags, env=env, calibrates=True) as server:
        yield server


@pytest.fixture(scope="session")
def stock_server() -> Iterator[Server]:
    """Plain SGLang: the plugin is installed, its policy is `none`."""
    with running_server(*EXACT, module="sglang.launch_server") as server:
        yield server


# On a slow machine the last tests with a server would end after the time there is.
TIME_LIMIT_S = float(os.environ.get("TAPER_TEST_TIME_LIMIT_S", "inf"))
BEGAN_S = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: a server that nothing uses any more is not started."""
    is_late = time.monotonic() - BEGAN_S > TIME_LIMIT_S
    if is_late and item.get_closest_marker("slow"):
        pytest.skip(f"not reached in the {TIME_LIMIT_S:.0f} s there are")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs a server is slow; cheap tests come first."""
    for item in items:
        if "e2e" in item.nodeid:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
