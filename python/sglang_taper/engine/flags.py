"""Hooks of the main process: flags in, settings out, refusals.

Settings reach child processes through `SGLANG_TAPER_*` variables: SGLang spawns its
processes, and its server arguments take no further fields.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sglang_taper import config as settings
from sglang_taper.config import TaperConfig
from sglang_taper.engine import plugin
from sglang_taper.engine.attention.choice import refused_attention
from sglang_taper.engine.hooks import Role
from sglang_taper.engine.refusals import refused
from sglang_taper.errors import FieldError, TaperError, UnsupportedMode
from sglang_taper.extensions import load_extensions
from sglang_taper.models import resolve_model_path
from sglang_taper.policy.admission import policy_names
from sglang_taper.policy.attention_profile import measured_from_profile
from sglang_taper.policy.latency import StepLatencyModel

WORKER_APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
WORKER_APP = "sglang_taper.engine.serving_app:app"

# What an entry point of ours changes: `python -m sglang_taper.launch_server` makes
# `taper` the default policy.
defaults: dict[str, object] = {}

# What we wrote into the environment ourselves: not a wish of the user when a second
# engine is built in the same process.
_exported: dict[str, str] = {}
_from_command_line = False


def add_flags_hook(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`."""
    settings.add_flags(parser, defaults)


def from_cli_args_hook(
    original: Callable[..., Any], cls: type, args: argparse.Namespace
) -> Any:
    """AROUND `ServerArgs.from_cli_args`: exits with code 2 on a bad setting."""
    global _from_command_line
    _from_command_line = True
    cli = {n: getattr(args, n) for n in settings.setting_names() if hasattr(args, n)}
    try:
        activate(cli)
        _resolve_model(vars(args))
    except TaperError as error:
        plugin.exit_with(str(error))
    return original(cls, args)


def make_server_args(**kwargs: Any) -> Any:
    """`Engine.server_args_class`: ServerArgs, less the keywords that are ours."""
    from sglang.srt.server_args import ServerArgs

    global _from_command_line
    _from_command_line = False
    names = settings.setting_names()
    activate({name: kwargs.pop(name) for name in names if name in kwargs})
    _resolve_model(kwargs)
    return ServerArgs(**kwargs)


def check_server_args_hook(_result: None, server_args: Any) -> None:
    """AFTER `ServerArgs.check_server_args`: refuse modes we would break."""
    for error in _refusals(server_args):
        if _from_command_line:
            plugin.exit_with(str(error))
        raise error


def _refusals(server_args: Any) -> Iterator[UnsupportedMode]:
    from sglang.srt.arg_groups.overrides import resolving_view

    config, resolved = current(), resolving_view(server_args)
    if config.enabled:
        yield from refused(resolved, os.environ.get("SGLANG_RUST_SERVER", ""))
    yield from refused_attention(config, resolved)


def check_ranks_hook(result: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER `Engine._launch_subprocesses`: every rank must run our scheduler."""
    if not current().enabled or _num_replicas() > 1:
        return  # the data-parallel controller does not pass our key on
    if not all("taper" in info for info in result[3].scheduler_infos):
        plugin.exit_with("a scheduler process came up without the plugin sglang_taper")


def _num_replicas() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().dp_size)


def activate(cli: Mapping[str, object]) -> TaperConfig:
    """Put the settings in force in this process and in those it will spawn.

    Raises FieldError for a bad setting and HookError when SGLang is not what our
    hooks were written against. With policy `none` no engine hook is registered.
    """
    config = settings.load(cli, _user_environment(), defaults)
    _export(config)
    if config.enabled:
        load_extensions()
        _check_policy(config.branch_policy)
        if config.latency_profile is not None:
            StepLatencyModel.from_profile(
                settings.read_latency_profile(config.latency_profile)
            )
        if config.attention_profile is not None:
            measured_from_profile(
                settings.read_json(config.attention_profile, "attention_profile")
            )
        plugin.preflight()
        plugin.install(Role.TOKENIZER)
        os.environ.setdefault(WORKER_APP_VARIABLE, WORKER_APP)
    return config


def _check_policy(name: str) -> None:
    """Raise FieldError naming the flag unless a policy of this name is registered."""
    if name not in policy_names():
        accepted = "one of " + ", ".join((settings.NO_POLICY, *policy_names()))
        raise FieldError(settings.flag_of("branch_policy"), name, accepted)


def current() -> TaperConfig:
    """The settings in force in this process."""
    return settings.load(defaults=defaults)


def _user_environment() -> dict[str, str]:
    environment = dict(os.environ)
    for name, value in _exported.items():
        if environment.get(name) == value:
            del environment[name]
    return environment


def _export(config: TaperConfig) -> None:
    for name in _exported:
        os.environ.pop(name, None)
    _exported.clear()
    for name, value in settings.to_environment(config).items():
        _exported[name] = os.environ[name] = value


def _resolve_model(args: dict[str, Any]) -> None:
    """Replace the name of the embedded model by its directory, in place."""
    path = args.get("model_path")
    resolved = resolve_model_path(path) if path is not None else path
    if resolved != path:
        args["served_model_name"] = args.get("served_model_name") or path
        args["model_path"] = resolved
