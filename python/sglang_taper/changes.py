"""Policy parameters that change while the server runs: what is accepted.

The ranges are those of the settings that give the parameters their first values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_taper.config import NO_POLICY, TaperConfig, checked
from sglang_taper.errors import FieldError
from sglang_taper.policy.admission import make_policy, policy_names
from sglang_taper.policy.types import PolicyParams
from sglang_taper.ranges import Range, WordsOrRange, word_or_number

# Parameter of a running policy -> the setting that gives its first value.
_PARAM_SETTINGS = {
    "policy": "branch_policy",
    "cap": "branch_cap",
    "rho": "slack_fraction",
    "deadline": "deadline",
    "utility": "branch_utility",
    "ttft_slo_ms": "ttft_slo_ms",
    "tpot_slo_ms": "tpot_slo_ms",
    "prefill_hold_s": "prefill_hold_s",
    "test_step_cost_ms": "test_step_cost_ms",
}
_JSON_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
    word_or_number: ((str, int, float), ""),
}


def updated_params(params: PolicyParams, changes: Mapping[str, object]) -> PolicyParams:
    """`params` with `changes` from outside applied; types are checked, not converted.

    `rho` None means the default of the deadline. Raises FieldError naming parameter,
    value and what is accepted.
    """
    if not changes:
        known = ", ".join(_PARAM_SETTINGS)
        raise FieldError("changes", dict(changes), f"at least one of {known}")
    accepted = {name: _checked_param(name, value) for name, value in changes.items()}
    return msgspec.structs.replace(params, **accepted)


def schema_of_changes() -> dict[str, Any]:
    """What `updated_params` accepts, as JSON schema."""
    properties = {
        name: _schema_of(TaperConfig.__dataclass_fields__[setting])
        for name, setting in _PARAM_SETTINGS.items()
    }
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "minProperties": 1,
    }


def _schema_of(f: Any) -> dict[str, Any]:
    accepted = f.metadata["accepted"]
    words = policy_names() if f.name == "branch_policy" else accepted
    if isinstance(words, WordsOrRange):
        kinds = [{"enum": list(words.words)}, _schema_of_range(words.numbers, "number")]
    elif isinstance(words, Range):
        whole = f.metadata["kind"] is int
        kinds = [_schema_of_range(words, "integer" if whole else "number")]
    else:
        kinds = [{"enum": list(words)}]
    if f.default is None:
        kinds.append({"type": "null"})
    return {"description": f.metadata["help"], "anyOf": kinds}


def _schema_of_range(numbers: Range, type_name: str) -> dict[str, Any]:
    low = "minimum" if numbers.include_low else "exclusiveMinimum"
    return {"type": type_name, low: numbers.low, "maximum": numbers.high}


def split_policies(text: str) -> list[str]:
    """`off,cap:2,taper:deadline=progress,rho=0.8,ledger` as one text for each policy.

    Parameters follow a colon, separated by colons or commas.
    """
    names: list[str] = []
    for piece in text.split(","):
        if names and "=" in piece.partition(":")[0]:
            names[-1] += ":" + piece
        else:
            names.append(piece.strip())
    return names


def parse_policy(text: str) -> dict[str, object]:
    """`NAME` or `NAME:PARAM=VALUE:...` as changes for `updated_params`.

    `taper:rho=0.8:deadline=progress` is what benchmarks call one policy; `cap:2` is
    `cap:cap=2`. Raises FieldError for anything else than parameters with a value.
    """
    name, *pairs = text.split(":")
    if name == "cap" and pairs and pairs[0].isdigit():
        pairs[0] = f"cap={pairs[0]}"
    changes: dict[str, object] = {"policy": name}
    for pair in pairs:
        param, equals, value = pair.partition("=")
        if not equals or param not in _PARAM_SETTINGS or param == "policy":
            known = ", ".join(sorted(_PARAM_SETTINGS.keys() - {"policy"}))
            raise FieldError("--policies", text, f"NAME:PARAM=VALUE with PARAM {known}")
        setting = TaperConfig.__dataclass_fields__[_PARAM_SETTINGS[param]]
        changes[param] = checked(setting, value, param)
    return changes


def _checked_param(name: str, value: object) -> object:
    if name not in _PARAM_SETTINGS:
        raise FieldError(name, value, "known: " + ", ".join(_PARAM_SETTINGS))
    f = TaperConfig.__dataclass_fields__[_PARAM_SETTINGS[name]]
    if value is None and f.default is None:
        return None
    types, shown = _JSON_TYPES[f.metadata["kind"]]
    if types == (int,) and isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number: 2.0 is an integer
    if isinstance(value, bool) or not isinstance(value, types):
        raise FieldError(name, value, shown or str(f.metadata["accepted"]))
    words = f.metadata["accepted"]
    if isinstance(words, WordsOrRange) and isinstance(value, str):
        # A number in quotes is fine on a command line, which has nothing else.
        if value not in words:
            raise FieldError(name, value, str(words))
        return value
    if value == NO_POLICY and name == "policy":
        reason = "engine hooks exist only from start-up on; use off or eager"
        raise FieldError(name, value, reason)
    if name == "policy":
        make_policy(str(value))
    return checked(f, value, name)
