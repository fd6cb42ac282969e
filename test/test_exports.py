"""Every public name can be reached, and what installs us points at real things."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import sglang_taper
from sglang_taper.engine import compat
from sglang_taper.engine.hooks import HOOKS, Hook, Kind, hook
from sglang_taper.errors import HookError
from sglang_taper.ops.native_library import SOURCE

REPOSITORY = Path(__file__).parents[1]
ROOT = REPOSITORY / "python" / "sglang_taper"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def is_defined(module: str, name: str) -> bool:
    """Read from the source: importing an engine module would import SGLang."""
    path = REPOSITORY / "python" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    nodes = ast.parse(file.read_text()).body
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return name in {node.name for node in nodes if isinstance(node, named)}


def test_public_names_of_the_package_exist() -> None:
    assert "RuntimeEndpoint" in sglang_taper.__all__
    for name in sglang_taper.__all__:
        assert getattr(sglang_taper, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Endpoint'"):
        _ = sglang_taper.Endpoint


def test_the_endpoint_is_a_backend_of_sglang_lang() -> None:
    from sglang.lang.backend.base_backend import BaseBackend

    assert issubclass(sglang_taper.RuntimeEndpoint, BaseBackend)


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(ROOT.rglob("*.py")) if "__all__ = " in p.read_text()],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_names_that_a_module_exports_exist(path: Path) -> None:
    relative = path.relative_to(ROOT.parent).with_suffix("")
    module = importlib.import_module(".".join(relative.parts).removesuffix(".__init__"))
    assert all(hasattr(module, name) for name in module.__all__)


def test_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == sglang_taper.__version__
    assert importlib.metadata.version("sglang-taper") == sglang_taper.__version__


def test_entry_points_lead_to_functions() -> None:
    groups = {**PROJECT["entry-points"], "console_scripts": PROJECT["scripts"]}
    assert {"sglang.srt.plugins", "sglang.srt.platforms"} <= groups.keys()
    for group, entries in groups.items():
        for name, value in entries.items():
            entry = EntryPoint(name, value, group)
            assert is_defined(entry.module, entry.attr), value


@pytest.mark.parametrize("row", HOOKS, ids=lambda row: row.id)
def test_a_hook_names_a_function_of_ours_or_overrides_a_method(row: Hook) -> None:
    assert hook(row.id) is row
    if row.kind is Kind.OVERRIDE:
        assert row.function is None
        assert row.target in set().union(*map(overridden_targets, REPLACED))
    elif row.kind is Kind.RELIED_ON:
        assert row.function is None
        assert exists_in_sglang(row.target)
    else:
        module, _, name = str(row.function).partition(":")
        assert is_defined(module, name)


REPLACED = [row for row in HOOKS if row.kind is Kind.REPLACE]


def overridden_targets(row: Hook) -> set[str]:
    """The methods our class defines, as if they were those of the class replaced."""
    module, _, name = str(row.function).partition(":")
    return {f"{row.target}.{method}" for method in methods_of(module, name)}


def methods_of(module: str, name: str) -> set[str]:
    """Defined by a class of ours, or by a base of ours that it mixes in."""
    file = ROOT.parent.joinpath(*module.split(".")).with_suffix(".py")
    body = ast.parse(file.read_text()).body
    (ours,) = [n for n in body if isinstance(n, ast.ClassDef) and n.name == name]
    methods = {n.name for n in ours.body if isinstance(n, ast.FunctionDef)}
    bases = {base.id for base in ours.bases if isinstance(base, ast.Name)}
    for node in body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(ROOT.name):
            for alias in node.names:
                if alias.name in bases:
                    methods |= methods_of(str(node.module), alias.name)
    return methods


@pytest.mark.parametrize("row", REPLACED, ids=lambda row: row.id)
def test_every_method_of_sglangs_class_that_we_override_is_in_the_table(
    row: Hook,
) -> None:
    """So that its fingerprint is checked."""
    rows = {
        other.target
        for other in HOOKS
        if other.kind is Kind.OVERRIDE and other.target.startswith(row.target)
    }
    targets = overridden_targets(row) - {f"{row.target}.__init__"}
    assert {target for target in targets if exists_in_sglang(target)} == rows


def exists_in_sglang(target: str) -> bool:
    try:
        compat.fingerprint(target)
    except HookError:
        return False
    return True


def test_the_package_ships_its_types_fingerprints_and_c_source() -> None:
    assert (ROOT / "py.typed").exists()
    assert (ROOT / "engine" / "fingerprints.json").exists()
    assert SOURCE.is_relative_to(ROOT)
    assert SOURCE.exists()
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
    shipped = settings["setuptools"]["package-data"]["sglang_taper"]
    files = {"py.typed", "engine/*.json", "engine/page/*.*", "kernels/cpu/*.[ch]"}
    assert files <= set(shipped)
    assert (ROOT / "engine" / "page" / "page.html").exists()


def test_the_licence_is_apache_2_and_ours() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "Copyright 2026 The sglang_taper authors" in text
    assert PROJECT["license"] == "Apache-2.0"
