"""The C kernel is compiled once, into a cache that processes share, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sglang_taper.ops import native_library
from sglang_taper.ops.native_library import (
    NativeUnavailable,
    cache_folder,
    compiled,
    find_library,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_library.cache_clear()
    yield cache_folder()
    find_library.cache_clear()


def compiler(folder: Path, text: str) -> str:
    """A command that says so much as a C compiler."""
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_the_library_is_compiled_once_and_leaves_nothing_else(cache: Path) -> None:
    path = compiled()
    written = path.stat().st_mtime_ns
    assert compiled() == path
    assert path.stat().st_mtime_ns == written
    assert list(cache.iterdir()) == [path]


@pytest.mark.slow
def test_processes_that_start_together_end_with_the_same_library(cache: Path) -> None:
    code = "from sglang_taper.ops import native_library as native;"
    code += "print(native.find_library().lanes)"
    command = [sys.executable, "-c", code]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: subprocess.check_output(command), range(3)))
    assert len(set(answers)) == 1
    assert int(answers[0]) >= native_library.MIN_LANES
    assert len(list(cache.iterdir())) == 1


def test_other_flags_are_another_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(native_library, "_compile", lambda *args: made.append(args[2]))
    compiled()
    compiled(["-mno-avx512f"])
    assert len(set(made)) == 2


def test_without_a_compiler_there_is_a_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    found = find_library()
    assert isinstance(found, NativeUnavailable)
    assert str(found) == "no C compiler: /nowhere/cc not found"


def test_the_compilers_last_word_is_the_reason_why_it_failed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "echo one >&2; echo two >&2; exit 3"
    text = f'case "$*" in *--version*) echo 1;; *) {says};; esac'
    monkeypatch.setenv("CC", compiler(tmp_path, text))
    found = find_library()
    assert isinstance(found, NativeUnavailable)
    assert str(found) == "the C compiler failed: two"
    assert list(cache.iterdir()) == []


def test_what_the_compiler_made_may_not_load(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo no > "$2"; shift; done; exit 0'
    monkeypatch.setenv("CC", compiler(tmp_path, text))
    found = find_library()
    assert isinstance(found, NativeUnavailable)
    assert "does not load" in str(found)


def test_a_cache_that_can_not_be_written_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang_taper").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="cache can not be written"):
        compiled()


SHARES_THREADS = """
import os, torch
from sglang_taper.ops import native_attention as ours
from sglang_taper.ops.segments import StepLayout

torch.set_num_threads(3)
a = torch.randn(600, 600)
(a @ a).exp().sum()
(torch.randn(1 << 20)).exp()
before = len(os.listdir("/proc/self/task"))
table = torch.arange(4000, dtype=torch.int32).view(4, 1000)
plan = ours.make_plan(StepLayout((), (1000,) * 4), table, torch.arange(4))
k, v = torch.randn(2, 4000, 2, 64)
assert plan.num_threads == 3
for _ in range(20):
    ours.decode(plan, torch.randn(4, 4, 64), k, v, 0.1)
print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_kernel_runs_on_the_threads_that_pytorch_has() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "3"}
    done = subprocess.check_output(
        [sys.executable, "-c", SHARES_THREADS], env=environment
    )
    before, after = map(int, done.split())
    assert before >= 3
    assert after == before


def test_the_library_says_which_types_it_serves() -> None:
    library = find_library()
    if isinstance(library, NativeUnavailable):
        pytest.skip(str(library))
    assert library.serves(torch.float32, torch.bfloat16)
    assert not library.serves(torch.float32, torch.float64)
