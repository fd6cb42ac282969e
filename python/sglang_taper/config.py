"""The server's settings: one frozen `TaperConfig`, CLI > environment > default.

The only module that reads `SGLANG_TAPER_*` environment variables. Each field knows
its flag, unit, accepted values and one sentence of help; `add_flags` and docs are
made from them, so nothing is written twice.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sglang_taper.errors import FieldError
from sglang_taper.policy.prefill import AUTO, AUTO_TTFT_SHARE, OFF
from sglang_taper.policy.types import PolicyParams
from sglang_taper.ranges import Range, WordsOrRange, word_or_number

ENV_PREFIX = "SGLANG_TAPER_"
NO_POLICY = "none"
DEADLINES = ("schedule", "progress")
UTILITIES = ("linear", "concave", "priority", "age", "need", "finishing")
ATTENTIONS = ("auto", "off", "native", "torch", "triton", "flashinfer")


def _setting(
    default: Any, help: str, accepted: Any, kind: Any = str, metavar: str | None = None
) -> Any:
    meta = {"help": help, "accepted": accepted, "kind": kind, "metavar": metavar}
    return field(default=default, metadata=meta)


_MS = Range(0, 86_400_000)


@dataclass(frozen=True)
class TaperConfig:
    """Settings of one server: field `x_y` is `--x-y` and `SGLANG_TAPER_X_Y`."""

    branch_policy: str = _setting(
        NO_POLICY,
        "Which branches of a request decode in a step: none (no engine hook at all), "
        "off (one per request), eager (all), cap (at most --branch-cap per request), "
        "taper (as many as the slack budget allows), ledger (as many as each "
        "request's schedule so far allows), or a policy registered by name.",
        None,
        metavar="POLICY",
    )
    branch_cap: int = _setting(
        2,
        "Branches per request and step with --branch-policy cap.",
        Range(1, 4096, include_low=True),
        int,
    )
    deadline: str = _setting(
        "schedule",
        "When a request's next token is due: schedule (first token + k x TPOT) or "
        "progress (last token + TPOT, as in the paper).",
        DEADLINES,
    )
    slack_fraction: float | None = _setting(
        None,
        "Share rho of the slack that extra branches may use in one step "
        "(default: 0.3 with schedule, 0.8 with progress).",
        Range(0, 1, include_low=True),
        float,
    )
    ttft_slo_ms: float = _setting(
        2000.0, "Default time-to-first-token target of a request.", _MS, float
    )
    tpot_slo_ms: float = _setting(
        50.0, "Default time-per-output-token target of a request.", _MS, float
    )
    branch_utility: str = _setting(
        "linear",
        "What an extra branch is worth: linear, concave (diminishing in the width of "
        "its request), priority (weighted by the request's priority); or whose "
        "branches come first: age (oldest request), need (narrowest stage), finishing "
        "(fewest tokens left by max_new_tokens).",
        UTILITIES,
    )
    latency_profile: str | None = _setting(
        None,
        "Step-latency profile (JSON) to start from; skips start-up calibration.",
        None,
        metavar="FILE",
    )
    shared_prefix_attention: str = _setting(
        "auto",
        "Attention that reads a shared prefix once per group: native (CPU, our C "
        "kernel, compiled at the first start), torch (CPU, PyTorch), triton or "
        "flashinfer (CUDA, with SGLang's flashinfer backend for decode), auto (on the "
        "CPU native, or torch where it can not be compiled; on CUDA flashinfer in the "
        "steps where --attention-profile says that it pays) or off (SGLang's own).",
        ATTENTIONS,
    )
    attention_profile: str | None = _setting(
        None,
        "Timings of shared-prefix attention on this GPU (attention_gate.json of "
        "benchmark/shared_prefix_gpu.py), by which auto decides.",
        None,
        metavar="FILE",
    )
    fork_pin_ttl_s: float = _setting(
        60.0,
        "Seconds a request without a living branch is remembered, with its deadlines "
        "and token counts, and its prefix pinned, for its next stage.",
        Range(0, 86_400, include_low=True),
        float,
    )
    max_pinned_fraction: float = _setting(
        0.5,
        "Largest share of the KV pool that fork pins may hold. Over it the oldest "
        "idle pin goes first; a fork then recomputes what is evicted.",
        Range(0, 1, include_low=True),
        float,
    )

    prefill_hold_s: str | float = _setting(
        OFF,
        "Prefill coalescing: hold prefills until one has waited for so many seconds "
        "or nothing decodes, then run all that wait. auto: "
        f"{AUTO_TTFT_SHARE:g} of the request's TTFT target.",
        WordsOrRange((OFF, AUTO), Range(0, 60)),
        word_or_number,
        metavar="{off,auto,SECONDS}",
    )
    test_step_cost_ms: float = _setting(
        0.0,
        "For tests and benchmarks that say so: milliseconds that the scheduler sleeps "
        "before each decode step, a fixed cost that the machine does not have.",
        Range(0, 1000, include_low=True),
        float,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None or f.default is not None:
                object.__setattr__(self, f.name, checked(f, value))

    @property
    def enabled(self) -> bool:
        """False with policy `none`: then no engine hook is registered."""
        return self.branch_policy != NO_POLICY

    @property
    def policy_params(self) -> PolicyParams:
        return PolicyParams(
            policy=self.branch_policy,
            cap=self.branch_cap,
            rho=self.slack_fraction,
            deadline=self.deadline,
            utility=self.branch_utility,
            ttft_slo_ms=self.ttft_slo_ms,
            tpot_slo_ms=self.tpot_slo_ms,
            prefill_hold_s=self.prefill_hold_s,
            test_step_cost_ms=self.test_step_cost_ms,
        )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def checked(f: Any, value: object, name: str | None = None) -> object:
    """`value` converted and in range, or FieldError naming flag, value and range.

    `name` stands for the flag in the error.
    """
    kind, accepted = f.metadata["kind"], f.metadata["accepted"]
    name = name or flag_of(f.name)
    try:
        converted = kind(value)
        if isinstance(value, bool) or (isinstance(value, float) and converted != value):
            raise ValueError  # int(2.7) would be 2
    except (TypeError, ValueError):
        expected = str(accepted)
        if kind is not word_or_number:
            expected = f"{kind.__name__} {accepted or ''}".strip()
        raise FieldError(name, value, expected) from None
    if accepted is not None and converted not in accepted:
        shown = str(accepted)
        if isinstance(accepted, tuple):
            shown = "one of " + ", ".join(accepted)
        raise FieldError(name, value, shown)
    return converted


def read_latency_profile(path: str) -> dict[str, Any]:
    """The JSON object in `path`; FieldError names the flag when there is none."""
    profile = read_json(path, "latency_profile")
    if not isinstance(profile, dict):
        flag = flag_of("latency_profile")
        raise FieldError(flag, path, "a file with one JSON object")
    return profile


def read_json(path: str, name: str) -> Any:
    """What the file of setting `name` holds; FieldError names the flag if it can not
    be read."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        accepted = f"a readable JSON file ({error})"
        raise FieldError(flag_of(name), path, accepted) from None


def to_environment(config: TaperConfig) -> dict[str, str]:
    """The variables from which `load` gives `config` again in another process."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {env_of(n): str(v) for n, v in values.items() if v is not None}


def add_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, object] | None = None
) -> None:
    """Add the group "branch parallelism"; absent flags stay absent (SUPPRESS).

    `defaults` are those of the entry point in use, shown in the help.
    """
    group = parser.add_argument_group("branch parallelism (sglang_taper)")
    for f in fields(TaperConfig):
        accepted = f.metadata["accepted"]
        group.add_argument(
            flag_of(f.name),
            dest=f.name,
            default=argparse.SUPPRESS,
            metavar=f.metadata["metavar"] or _metavar(accepted, f.metadata["kind"]),
            help=_help(f, (defaults or {}).get(f.name, f.default)),
        )


def _metavar(accepted: object, kind: type) -> str:
    if isinstance(accepted, tuple):
        return "{" + ",".join(accepted) + "}"
    return kind.__name__.upper()


def _help(f: Any, default: object) -> str:
    text: str = f.metadata["help"]
    if isinstance(f.metadata["accepted"], Range | WordsOrRange):
        text += f" Accepted: {f.metadata['accepted']}."
    if default is not None:
        text += f" Default: {default}."
    return text.replace("%", "%%")


def setting_names() -> tuple[str, ...]:
    return tuple(f.name for f in fields(TaperConfig))


def load(
    cli: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> TaperConfig:
    """The settings in force: `cli`, else `env` (default: os.environ), else `defaults`.

    Raises FieldError for an unknown CLI key or an unacceptable value.
    """
    env = os.environ if env is None else env
    chosen: dict[str, object] = dict(defaults or {})
    for name in setting_names():
        if env_of(name) in env:
            chosen[name] = env[env_of(name)]
    chosen.update(cli or {})
    for name in chosen:
        if name not in setting_names():
            raise FieldError(name, chosen[name], "known: " + ", ".join(setting_names()))
    return TaperConfig(**chosen)  # type: ignore[arg-type]
