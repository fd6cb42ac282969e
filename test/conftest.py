"""Shared fixtures. Servers are started once per session and used by many tests."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from server import EXACT, Server, running_server

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IN_WORKER:
    # Servers of two workers on two cores: threads that wait for each other would spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED_GROUPS = ("stock", "taper")
# Two workers, each with the shared servers of its files, fit 24 GB only if what needs
# several at once is in one of them.
MANY_SERVERS = {"test_data_parallel.py", "test_goodput.py", "test_tensor_parallel.py"}

# The same examples everywhere; how fast they run is the machine's affair.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

shared_servers: list[Server] = []


@pytest.fixture(scope="session")
def taper_server() -> Iterator[Server]:
    """Overlap scheduling on, strict memory checks at every step."""
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    flags = (*EXACT, "--enable-metrics", "--enable-custom-logit-processor")
    with running_server(*flags, env=env, calibrates=True) as server:
        shared_servers.append(server)
        yield server


@pytest.fixture(scope="session")
def stock_server() -> Iterator[Server]:
    """Plain SGLang: the plugin is installed, its policy is `none`."""
    with running_server(*EXACT, module="sglang.launch_server") as server:
        shared_servers.append(server)
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs a server is slow. Cheap tests come first, or fill up the end."""
    for item in items:
        if "e2e" in item.nodeid:
            item.add_marker(pytest.mark.slow)
    items.sort(key=_turn if IN_WORKER else _is_slow)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What comes after the last test with a shared server needs its memory."""
    if IN_WORKER and nextitem and _server_group(nextitem.path) not in SHARED_GROUPS:
        while shared_servers:
            shared_servers.pop().stop()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that use the same servers run in the same process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _server_group(config.rootpath / nodeid.split("::")[0])

    return ByServers(config, log)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _turn(item: pytest.Item) -> tuple[bool, bool, bool]:
    """The longest first, and who needs many servers while no shared one is there."""
    is_shared = _server_group(item.path) in SHARED_GROUPS
    return not _is_slow(item), not is_shared, item.path.name not in MANY_SERVERS


@functools.cache
def _server_group(path: Path) -> str:
    """All files that need the same servers, or a file that needs none of these."""
    text = path.read_text()
    if path.name in MANY_SERVERS or "stock_server" in text:
        return "stock"
    return "taper" if "taper_server" in text or "eager_and_idle" in text else str(path)
