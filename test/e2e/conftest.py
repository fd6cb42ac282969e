"""Fixtures of the tests with a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forking import assert_idle_pool

from server import Server


@pytest.fixture
def eager_and_idle(taper_server: Server) -> Iterator[None]:
    """`eager`, an empty cache before, and afterwards a server that lives and is idle,
    with every token of its pool accounted for."""
    taper_server.set_policy(policy="eager")
    taper_server.flush()
    yield
    assert_idle_pool(taper_server)
    assert taper_server.process.poll() is None
