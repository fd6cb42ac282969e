"""Which rows SGLang retracts first when KV memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_taper.policy.forks import retraction_order


def keep_one_branch_hook(
    original: Callable[[list[Any]], list[int]], reqs: list[Any]
) -> list[int]:
    """AROUND `ScheduleBatch._get_decode_retraction_order`: indices of `reqs`, the
    one to keep longest first. Priorities count where SGLang orders by them."""
    from sglang.srt.runtime_context import get_schedule

    by_priority = get_schedule().retraction_policy == "priority"
    return retraction_order(
        original(reqs),
        [req.taper.state.request for req in reqs],
        [req.priority if by_priority else None for req in reqs],
    )
