"""A converted model, made once for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_taper import models

ENSURE = "from sglang_taper import models; print(models.ensure_smollm2())"


class Built(NamedTuple):
    """A cache filled by two processes that started together."""

    directory: Path
    outputs: list[str]
    errors: list[str]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENSURE],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=600) for process in processes]
    outputs, errors = zip(*results, strict=True)
    assert all(process.returncode == 0 for process in processes), errors
    return Built(Path(outputs[0].strip()), list(outputs), list(errors))


@pytest.fixture
def warm(built: Built, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared cache, in use; tests only read it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.directory.parent.parent))
    return built.directory


@pytest.fixture
def own_copy(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, copied without modification times."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = models.smollm2_dir()
    shutil.copytree(built.directory, target, copy_function=shutil.copyfile)
    return target


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a pip that can reach no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path
