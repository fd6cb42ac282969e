"""Which package may import which, and how large things may get.

Read from the syntax trees, so imports inside functions count too. A new package needs
a row in `RULES`: decide there what it may know before it knows it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "sglang_taper"
ROOT = REPOSITORY / "python" / PACKAGE
MAX_FILE_LINES = 300
MEDIAN_FUNCTION_LINES, P90_FUNCTION_LINES, MAX_FUNCTION_LINES = 10, 35, 60
ANYTHING = frozenset({"*"})

# The part of the standard library that neither looks at the world nor at a clock.
PURE_LIBRARY = frozenset(
    {
        *("__future__", "bisect", "collections", "dataclasses", "enum", "functools"),
        *("heapq", "itertools", "math", "operator", "re", "reprlib", "typing"),
    }
)


STATISTICS = PURE_LIBRARY | {"statistics"}


class Rule(NamedTuple):
    """What a package may import: ours, libraries, and libraries inside functions.

    A library with dots allows that module and what is below it.
    """

    ours: str = ""
    libraries: str = ""
    lazily: str = ""
    standard: frozenset[str] = ANYTHING


RULES = {
    "errors": Rule(standard=PURE_LIBRARY),
    "policy": Rule("errors", "msgspec", standard=PURE_LIBRARY),
    "protocol": Rule("errors", "msgspec", standard=PURE_LIBRARY),
    "ids": Rule(),
    "ranges": Rule(standard=PURE_LIBRARY),
    "config": Rule("errors policy ranges"),
    "changes": Rule("config errors policy ranges", "msgspec"),
    "front_ends": Rule("errors protocol", "msgspec", standard=PURE_LIBRARY),
    "extensions": Rule("errors front_ends policy"),
    "ops": Rule("errors kernels", "msgspec numpy torch triton"),
    "ops/segments.py": Rule("errors", "msgspec", standard=PURE_LIBRARY),
    "ops/work_list.py": Rule("errors", "msgspec numpy"),
    "ops/group_slots.py": Rule(libraries="msgspec numpy"),
    "ops/flashinfer_levels.py": Rule(libraries="flashinfer msgspec numpy torch"),
    "kernels": Rule(libraries="triton", standard=frozenset()),
    "models": Rule("errors", "tqdm", "torch safetensors transformers tokenizers"),
    "platform": Rule(libraries="sglang.srt.platforms", lazily="torch"),
    "frontend": Rule("errors ids protocol", "msgspec httpx"),
    # the one module that needs SGLang; the package is imported without it
    "frontend/endpoint.py": Rule("ids protocol", "msgspec sglang.lang"),
    "engine": Rule(
        "root changes config errors extensions front_ends ids models ops platform "
        "policy probe protocol",
        "fastapi msgspec numpy orjson pydantic requests sglang starlette torch",
        "prometheus_client",
    ),
    "workload": Rule("errors", "msgspec"),
    "sim": Rule("changes errors policy workload", "msgspec"),
    "probe": Rule(libraries="msgspec requests"),
    "calibrate": Rule(
        "errors models policy probe protocol server_options server_process",
        "msgspec requests tqdm",
        "matplotlib",
    ),
    "calibrate/fit.py": Rule("errors policy probe", "msgspec", standard=STATISTICS),
    "calibrate/grid.py": Rule("policy probe", standard=PURE_LIBRARY),
    "server_options": Rule("errors models"),
    "server_process": Rule("errors", "httpx", "torch"),
    "demo": Rule(
        "root errors frontend models protocol server_options server_process workload",
        "httpx rich",
    ),
    "demo/program.py": Rule("frontend", "sglang sglang.lang"),
    # entry points: light themselves, everything else inside functions
    "__init__": Rule("frontend"),
    "bootstrap": Rule(),
    "explain": Rule("errors", lazily="httpx"),
    "cli": Rule("root calibrate demo engine errors explain extensions sim"),
    "launch_server": Rule("engine", lazily="sglang"),
}


class Import(NamedTuple):
    name: str  # dotted, absolute
    is_lazy: bool  # inside a function, or for type checkers only


def imports_of(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text()), is_lazy=False))


def _imports(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, is_lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "use absolute imports, so that this test sees them"
        yield from (
            Import(f"{node.module}.{alias.name}", is_lazy) for alias in node.names
        )
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, is_lazy or _postpones(node))


def _postpones(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def owner_of(path: Path) -> str:
    """The key of the rule for a file."""
    relative = path.relative_to(ROOT)
    if relative.as_posix() in RULES:
        return relative.as_posix()
    return relative.parts[0].removesuffix(".py")


def our_package(name: str) -> str:
    """`sglang_taper.policy.slack.x` is of `policy`; a name of the root is of `root`."""
    first = name.split(".")[1] if "." in name else "root"
    exists = (ROOT / first).is_dir() or (ROOT / f"{first}.py").is_file()
    return first if exists else "root"


def is_allowed(owner: str, imported: Import) -> bool:
    rule = RULES[owner]
    library = imported.name.split(".")[0]
    if library == PACKAGE:
        own = owner.split("/")[0]
        return our_package(imported.name) in {own, *rule.ours.split()}
    if library in sys.stdlib_module_names:
        return rule.standard is ANYTHING or library in rule.standard
    allowed = rule.libraries.split() + rule.lazily.split() * imported.is_lazy
    return any(f"{imported.name}.".startswith(f"{prefix}.") for prefix in allowed)


SOURCES = sorted(ROOT.rglob("*.py"))
# A link, which the search above does not follow. The functions of a kernel are as long
# as its arguments are many.
KERNELS = sorted((ROOT / "kernels").glob("*.py"))


def test_the_kernels_are_found_where_the_package_looks_for_them() -> None:
    assert [path.name for path in KERNELS] == sorted(
        path.name for path in (REPOSITORY / "kernels").glob("*.py")
    )


@pytest.mark.parametrize(
    "path", SOURCES + KERNELS, ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_file_imports_only_what_its_package_may_know(path: Path) -> None:
    owner = owner_of(path)
    assert owner in RULES, f"package {owner} has no rule"
    wrong = [i.name for i in imports_of(path) if not is_allowed(owner, i)]
    assert wrong == [], f"{owner} must not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("owner", "name", "is_lazy"),
    [
        ("policy", "torch", True),
        ("policy", "time", False),
        ("policy", "random", True),
        ("policy", "logging", False),
        ("policy", "os", False),
        ("policy", f"{PACKAGE}.engine.clock", True),
        ("frontend", f"{PACKAGE}.engine", True),
        ("frontend", "sglang.lang.interpreter", True),
        ("frontend/endpoint.py", "sglang.srt.server_args", True),
        ("platform", "sglang.srt.managers.scheduler", False),
        ("models", "torch", False),
        ("demo", f"{PACKAGE}.engine.plugin", True),
        ("ops", "sglang", True),
        ("ops/segments.py", "torch", True),
        ("ops", "sgl", False),
        ("kernels", "torch", False),
    ],
)
def test_an_import_in_the_wrong_direction_is_noticed(
    owner: str, name: str, is_lazy: bool
) -> None:
    assert not is_allowed(owner, Import(name, is_lazy))


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import os.path\n"
        "from sglang_taper import policy\n"
        "if TYPE_CHECKING:\n    from torch import Tensor\n"
        "def f():\n    async def g():\n        import sglang\n"
    )
    assert imports_of(file) == [
        Import("os.path", False),
        Import("sglang_taper.policy", False),
        Import("torch.Tensor", True),
        Import("sglang", True),
    ]


@pytest.mark.parametrize(
    "path",
    sorted((REPOSITORY / "benchmark").rglob("*.py")),
    ids=lambda path: path.name,
)
def test_benchmarks_do_not_know_the_engine(path: Path) -> None:
    names = {i.name for i in imports_of(path)}
    assert not any(name.startswith(f"{PACKAGE}.engine") for name in names)


def test_every_library_we_import_is_a_dependency_of_ours() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]["bench"]
    declared = {
        requirement.split(";")[0].split("=")[0].strip().replace("-", "_")
        for requirement in (*project["dependencies"], *optional)
    }
    used = {
        i.name.split(".")[0] for path in SOURCES + KERNELS for i in imports_of(path)
    }
    ours = {PACKAGE, *sys.stdlib_module_names}
    provided = {"flashinfer"} if "flashinfer_python" in declared else set()
    assert used - ours - declared - provided == set()


LIGHT_MODULES = (
    "",
    ".config",
    ".policy.admission",
    ".front_ends.registry",
    ".extensions",
    ".frontend",
    ".frontend.client",
    ".models",
    ".bootstrap",
    ".cli",
    ".launch_server",
    ".demo.options",
    ".sim.command",
    ".calibrate.options",
    ".explain",
    ".engine.hooks",
)


def test_light_modules_import_neither_torch_nor_sglang() -> None:
    probe = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'sglang'} & sys.modules.keys()\n"
        "    assert not heavy, (name, heavy)\n"
    )
    names = [PACKAGE + suffix for suffix in LIGHT_MODULES]
    subprocess.run([sys.executable, "-c", probe, *names], check=True)


@pytest.mark.parametrize(
    "path", SOURCES + KERNELS, ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_FILE_LINES


def test_functions_are_short() -> None:
    lengths = sorted(
        (node.end_lineno - node.lineno + 1, f"{path.name}:{node.name}")
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lines = [length for length, _ in lengths]
    assert median(lines) <= MEDIAN_FUNCTION_LINES
    assert lines[len(lines) * 9 // 10] <= P90_FUNCTION_LINES
    assert lengths[-1][0] <= MAX_FUNCTION_LINES, lengths[-1]


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        p.name
        for p in SOURCES + KERNELS
        if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []
