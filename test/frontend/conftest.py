"""Fixtures of the frontend's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from recorder import Recorder, running_recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with running_recorder() as recorder:
        yield recorder
