"""`sglang-taper check`: is every hook in place on this machine?

Installs all rows in one process, which imports SGLang's scheduler and tokenizer
manager, and verifies each. Starts no server.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from sglang_taper.engine import compat, plugin
from sglang_taper.engine.hooks import HOOKS, Hook, Role
from sglang_taper.errors import HookError

OK = "ok"


def check_hooks() -> dict[str, Any]:
    """Facts as JSON-safe data: `ok`, versions, and one entry per hook."""
    expected = compat.expected_fingerprints()
    states = {row.id: _fingerprint_state(row, expected) for row in HOOKS}
    if all(state == OK for state in states.values()):
        states = _installed_states()
    hooks = [
        {
            "id": row.id,
            "target": row.target,
            "kind": row.kind.value,
            "process": row.role.value,
            "state": states[row.id],
        }
        for row in HOOKS
    ]
    problem = _version_problem()
    return {
        "ok": problem is None and all(state == OK for state in states.values()),
        "sglang": importlib.metadata.version("sglang"),
        "expected_sglang": compat.SGLANG_VERSION,
        "problem": problem,
        "platform": _platform(),
        "hooks": hooks,
    }


def _version_problem() -> str | None:
    try:
        compat.check_version()
    except HookError as error:
        return str(error)
    return None


def _fingerprint_state(row: Hook, expected: dict[str, str]) -> str:
    try:
        plugin.check_fingerprint(row, expected)
    except HookError as error:
        return str(error)
    return OK


def _installed_states() -> dict[str, str]:
    importlib.import_module("sglang.srt.entrypoints.engine")
    states = {}
    for role in Role:
        try:
            plugin.install(role)
        except HookError as error:
            states.update(dict.fromkeys((r.id for r in _rows(role)), str(error)))
        else:
            states.update(dict.fromkeys((r.id for r in _rows(role)), OK))
    return states


def _rows(role: Role) -> list[Hook]:
    return [row for row in HOOKS if row.role is role]


def _platform() -> str:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__
