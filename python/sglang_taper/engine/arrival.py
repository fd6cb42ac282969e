"""What a request of ours brings along to the scheduler."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from sglang_taper.engine.headers import scoped_name
from sglang_taper.errors import FieldError
from sglang_taper.protocol import (
    CUSTOM_PARAMS_KEY,
    SCOPE_KEY,
    BranchMeta,
    parse_branch_meta,
)


def take_metadata(req: Any) -> dict[str, Any]:
    """Our metadata, taken out of the parameters that custom logit processors see."""
    params = req.sampling_params
    if not isinstance(params.custom_params, dict):
        return {}
    if CUSTOM_PARAMS_KEY not in params.custom_params:
        return {}
    others = dict(params.custom_params)
    raw = others.pop(CUSTOM_PARAMS_KEY)
    # Copied: requests that travelled together may share the object.
    req.sampling_params = copy.copy(params)
    req.sampling_params.custom_params = others or None
    return dict(raw) if isinstance(raw, dict) else {}


def checked_metadata(raw: dict[str, Any]) -> BranchMeta:
    """Checked in the tokenizer process already; a caller that went around it gets a
    request that stands alone. Its group has the name it has among all callers'."""
    scope = str(raw.get(SCOPE_KEY, ""))
    try:
        meta = parse_branch_meta({k: v for k, v in raw.items() if k != SCOPE_KEY})
    except FieldError:
        return BranchMeta()
    if meta.group is None:
        return meta
    return msgspec.structs.replace(meta, group=scoped_name(scope, meta.group))
