"""Wire names and checks shared by client, tokenizer process and scheduler.

The metadata of a branch is one flat dict of scalars at
`sampling_params.custom_params["taper"]` (docs/architecture.md, "Wire format").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_taper.errors import FieldError

CUSTOM_PARAMS_KEY = "taper"
META_INFO_KEY = "taper"
# Between our own processes only: when the client made an n>1 call (`perf_counter` ms).
CALLED_KEY = "called_ms"
# The same: when this request came, for all ranks alike (`perf_counter` ms).
ARRIVED_KEY = "arrived_ms"
# The same: whose group it is.
SCOPE_KEY = "scope"
GROUP_HEADER = "x-taper-group"
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
# Routers of SGLang keep requests with the same value on one replica.
ROUTING_KEY_HEADER = "x-smg-routing-key"
FRONT_END_HEADER = "x-taper-front-end"

GROUP_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
MAX_WIDTH = 4096
MAX_DEPTH = 64
MAX_STAGE = 1_000_000
MAX_SLO_MS = 86_400_000.0
MAX_PRIORITY = 1_000_000.0
MAX_RID_LENGTH = 256
MAX_NAME_LENGTH = 64


class BranchMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Validated metadata of one branch. Without `group` the request stands alone."""

    group: str | None = None
    branch: int = 0
    width: int = 1
    parent: str | None = None
    depth: int = 0
    stage: int = 0
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    priority: float | None = None
    first_k: int | None = None
    front_end: str | None = None

    def to_wire(self) -> dict[str, Any]:
        return {k: v for k, v in msgspec.to_builtins(self).items() if v is not None}


def _check_integer(field: str, value: object, low: int, high: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not low <= value <= high
    ):
        raise FieldError(field, value, f"an integer from {low} to {high}")
    return value


def check_positive(field: str, value: object, high: float) -> float:
    """`value` as a float in (0, high]; raises FieldError naming the field."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FieldError(field, value, f"a number above 0 and at most {high:g}")
    if not 0 < value <= high:  # also catches NaN
        raise FieldError(field, value, f"a number above 0 and at most {high:g}")
    return float(value)


def _check_group(field: str, value: object) -> str:
    if not isinstance(value, str) or not GROUP_PATTERN.fullmatch(value):
        raise FieldError(field, value, "1 to 128 characters of A-Z a-z 0-9 _ . : -")
    return value


def _check_parent(field: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_RID_LENGTH:
        raise FieldError(
            field, value, f"a request id of 1 to {MAX_RID_LENGTH} characters"
        )
    return value


def _check_name(field: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_LENGTH:
        raise FieldError(field, value, f"a name of 1 to {MAX_NAME_LENGTH} characters")
    return value


_CHECKS = {
    "group": _check_group,
    "branch": lambda f, v: _check_integer(f, v, 0, MAX_WIDTH - 1),
    "width": lambda f, v: _check_integer(f, v, 1, MAX_WIDTH),
    "parent": _check_parent,
    "depth": lambda f, v: _check_integer(f, v, 0, MAX_DEPTH),
    "stage": lambda f, v: _check_integer(f, v, 0, MAX_STAGE),
    "ttft_slo_ms": lambda f, v: check_positive(f, v, MAX_SLO_MS),
    "tpot_slo_ms": lambda f, v: check_positive(f, v, MAX_SLO_MS),
    "priority": lambda f, v: check_positive(f, v, MAX_PRIORITY),
    "first_k": lambda f, v: _check_integer(f, v, 1, MAX_WIDTH),
    "front_end": _check_name,
}


def with_metadata(
    sampling_params: Mapping[str, Any] | None, wire: dict[str, Any]
) -> dict[str, Any]:
    """A copy of `sampling_params` that carries `wire`, the very object.

    Other keys of `custom_params` stay. Nothing passed in is written to.
    """
    params = dict(sampling_params or {})
    others = params.get("custom_params") or {}
    return {**params, "custom_params": {**others, CUSTOM_PARAMS_KEY: wire}}


# A request that is not a branch may still bring these; `first_k` for its samples.
STANDALONE_KEYS = frozenset(
    {"ttft_slo_ms", "tpot_slo_ms", "priority", "first_k", "front_end"}
)


def parse_branch_meta(raw: object, field: str = "custom_params.taper") -> BranchMeta:
    """Check a metadata dict from outside.

    Raises FieldError naming the first bad field, its value and the accepted range.
    A key whose value is None counts as absent.
    """
    if not isinstance(raw, Mapping):
        raise FieldError(field, raw, f"an object with keys {', '.join(_CHECKS)}")
    for key in raw:
        if key not in _CHECKS:
            raise FieldError(
                f"{field}.{key}", raw[key], f"known keys are {', '.join(_CHECKS)}"
            )
    given = {k: v for k, v in raw.items() if v is not None}
    if "group" not in given and not STANDALONE_KEYS.issuperset(given):
        raise FieldError(f"{field}.group", None, "required: the id of the request")
    checked = {k: _CHECKS[k](f"{field}.{k}", v) for k, v in given.items()}
    meta = BranchMeta(**checked)  # type: ignore[arg-type]
    if "width" in given:
        if meta.branch >= meta.width:
            raise FieldError(
                f"{field}.branch", meta.branch, f"less than width={meta.width}"
            )
        check_first_k(meta, meta.width, field)
    return meta


def check_first_k(meta: BranchMeta, width: int, field: str) -> None:
    """Raise FieldError when a fork of `width` branches has no `first_k` of them."""
    if meta.first_k is not None and meta.first_k > width:
        accepted = f"at most the number of branches, {width}"
        raise FieldError(f"{field}.first_k", meta.first_k, accepted)


def fork_meta(
    source: BranchMeta,
    width: int,
    stage: int,
    parent: str | None,
    *,
    first_k: int | None = None,
    field: str = "fork",
) -> list[BranchMeta]:
    """Metadata of the `width` children of `source`, which sent `parent` (a rid) last.

    The children are one level deeper and keep group, SLOs and priority. Raises
    FieldError, below `field`, when `width`, the depth, `stage` or `first_k` leave the
    range the server accepts.
    """
    first = msgspec.structs.replace(
        source,
        branch=0,
        width=width,
        depth=source.depth + 1,
        stage=stage,
        parent=parent,
        first_k=first_k,
    )
    parse_branch_meta(first.to_wire(), field)
    check_first_k(first, width, field)
    return [msgspec.structs.replace(first, branch=i) for i in range(width)]
