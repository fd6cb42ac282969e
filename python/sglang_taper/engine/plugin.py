"""Register our hooks and make sure they are really there, or exit.

SGLang logs a failing plugin or hook and starts without it. Everything here fails
loudly instead: exit code 2 and one paragraph. `register` is the entry point of the
group `sglang.srt.plugins` and runs in every process SGLang starts.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import sys
from typing import Any, NoReturn

from sglang_taper import config as settings
from sglang_taper.engine import compat
from sglang_taper.engine.attention_rows import CPU_ATTENTION_HOOKS, CUDA_ATTENTION_HOOKS
from sglang_taper.engine.hooks import HOOKS, Hook, Kind, Role
from sglang_taper.errors import ExtensionError, HookError, TaperError
from sglang_taper.extensions import load_extensions

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
_TOKENIZER_MODULE = "sglang.srt.managers.tokenizer_manager"
_ENGINE_MODULE = "sglang.srt.entrypoints.engine"

_ROLES_BY_TARGET: dict[str | None, Role | None] = {
    "run_scheduler_process": Role.SCHEDULER,
    "run_scheduler_process_with_init_pipe": Role.SCHEDULER,
    "run_detokenizer_process": None,
    "run_multi_detokenizer_router_process": None,
    "run_data_parallel_controller_process": None,
}

# Rows installed in this process, by id.
installed: dict[str, Hook] = {}


def register() -> None:
    """Install what this process needs. Exits with code 2 when that fails."""
    try:
        _register(current_role())
    except ExtensionError as error:
        exit_with(str(error))
    except TaperError as error:
        exit_with(
            f"{error}. The branch policies can not run; install "
            f"sglang=={compat.SGLANG_VERSION}, or uninstall sglang-taper."
        )


def exit_with(message: str) -> NoReturn:
    """One paragraph on standard error and exit code 2."""
    sys.stderr.write(f"sglang_taper: error: {message}\n")
    sys.stderr.flush()
    raise SystemExit(2) from None


def current_role() -> Role | None:
    """Which process this is: by the function SGLang started it with, else by what
    is imported there before plugins are loaded. None: nothing to do there."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    name = getattr(target, "__name__", None)
    if name in _ROLES_BY_TARGET:
        return _ROLES_BY_TARGET[name]
    if multiprocessing.parent_process() is None or _TOKENIZER_MODULE in sys.modules:
        return Role.MAIN
    return Role.SCHEDULER if _SCHEDULER_MODULE in sys.modules else None


def _register(role: Role | None) -> None:
    if role is None:
        return
    if role is Role.MAIN:
        install(Role.MAIN)
    enabled = settings.load().enabled
    if enabled:
        load_extensions()
    if enabled and role is Role.SCHEDULER:
        install(Role.SCHEDULER)
    if enabled and role is Role.MAIN and _TOKENIZER_MODULE in sys.modules:
        install(Role.TOKENIZER)


def preflight(role: Role | None = None) -> None:
    """Version and fingerprints of all rows (of one role). Raises HookError."""
    compat.check_version()
    expected = compat.expected_fingerprints()
    for row in HOOKS:
        if role in (None, row.role):
            check_fingerprint(row, expected)


def check_fingerprint(row: Hook, expected: dict[str, str]) -> None:
    """Raise HookError when the target of `row` is missing or has changed."""
    found = compat.fingerprint(row.target)
    if found != expected.get(row.target):
        raise HookError(
            f"hook {row.id}: {row.target} has changed (fingerprint {found}, "
            f"expected {expected.get(row.target)})"
        )


def install(role: Role) -> None:
    """Check, register, apply and verify all rows of `role`. Idempotent."""
    preflight(role)
    rows = [row for row in HOOKS if row.role is role and _wanted(row)]
    for row in rows:
        if row.kind is Kind.ASSIGN:
            _assign(row)
        elif row.function is not None:
            _register_row(row)
    _registry().apply_hooks()
    for row in rows:
        verify(row)
        installed[row.id] = row


def _wanted(row: Hook) -> bool:
    """Engine keywords need a loaded engine; importing it would cost seconds."""
    if row.id in installed:
        return False
    if row in CPU_ATTENTION_HOOKS + CUDA_ATTENTION_HOOKS:
        is_on = settings.load().shared_prefix_attention != "off"
        return is_on and (row in CPU_ATTENTION_HOOKS or _has_cuda())
    return row.id != "engine-keywords" or _ENGINE_MODULE in sys.modules


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _registry() -> Any:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry


def _register_row(row: Hook) -> None:
    from sglang.srt.plugins.hook_registry import HookType

    _registry().register(row.target, function_of(row), HookType(row.kind.value))


def _assign(row: Hook) -> None:
    owner, _, name = row.target.rpartition(".")
    setattr(pkgutil.resolve_name(owner), name, staticmethod(function_of(row)))


def function_of(row: Hook) -> Any:
    """Our function or class behind a row that has one."""
    assert row.function is not None, f"{row.id} has no function"
    module, _, name = row.function.partition(":")
    return getattr(importlib.import_module(module), name)


def verify(row: Hook) -> None:
    """Raise HookError unless the target really is ours now."""
    if row.kind is Kind.RELIED_ON:
        return
    owner, _, name = row.target.rpartition(".")
    found = getattr(pkgutil.resolve_name(owner), name)
    if row.kind is Kind.OVERRIDE:
        good = _is_ours(found)
    elif row.kind in (Kind.REPLACE, Kind.ASSIGN):
        good = found is function_of(row)
    else:
        good = row.target in _registry()._patched and hasattr(found, "__wrapped__")
    if not good:
        raise HookError(f"hook {row.id}: {row.target} was not patched by SGLang")


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("sglang_taper.")
