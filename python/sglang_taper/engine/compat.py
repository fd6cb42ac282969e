"""Is the SGLang in front of us the one our hooks were written against?

Fingerprints are taken from the source text of a hooked function, found without
importing its module, so a start-up check costs no import and runs in any process.
`fingerprints.json` beside this file holds the expected ones; `python -m
sglang_taper.engine.compat` writes it anew after an upgrade was reviewed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path

from sglang_taper.errors import HookError

SGLANG_VERSION = "0.5.23"
FINGERPRINTS = Path(__file__).with_name("fingerprints.json")


def check_version() -> None:
    """Raise HookError unless exactly the supported SGLang is installed."""
    found = importlib.metadata.version("sglang")
    if found != SGLANG_VERSION:
        raise HookError(f"needs sglang=={SGLANG_VERSION}, found {found}")


def fingerprint(target: str) -> str:
    """First 16 hex digits of the SHA-256 of the source of `module.Class.function`.

    Raises HookError when the target does not exist.
    """
    module, names = _split(target)
    lines, tree = _source(module)
    node: ast.AST = tree
    for name in names:
        node = _child(node, name, target)
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])  # type: ignore[attr-defined]
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expected_fingerprints() -> dict[str, str]:
    return dict(json.loads(FINGERPRINTS.read_text()))


def _split(target: str) -> tuple[str, list[str]]:
    """(module, names inside it). Imports packages on the way, never the module."""
    parts = target.split(".")
    for cut in range(1, len(parts)):
        module = ".".join(parts[:cut])
        spec = importlib.util.find_spec(module)
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return module, parts[cut:]
    raise HookError(f"{target}: no such module")


@functools.cache
def _source(module: str) -> tuple[list[str], ast.Module]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise HookError(f"{module}: no source file")
    text = Path(spec.origin).read_text()
    return text.splitlines(), ast.parse(text)


def _child(node: ast.AST, name: str, target: str) -> ast.AST:
    for child in ast.iter_child_nodes(node):
        if _defines(child, name):
            return child
    raise HookError(f"{target}: {name} is not defined there")


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return False


def write_fingerprints() -> None:
    from sglang_taper.engine.hooks import HOOKS

    current = {hook.target: fingerprint(hook.target) for hook in HOOKS}
    FINGERPRINTS.write_text(json.dumps(current, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_fingerprints()
