"""Records and states as the demo gets them, with defaults for everything."""

from __future__ import annotations

from typing import Any

from sglang_taper.demo.score import BranchSteps, RequestRecord


def a_record(
    *,
    forked: bool = False,
    ttft_s: float = 0.1,
    tpot_s: float = 0.05,
    branch_tokens: tuple[int, ...] = (11,),
    branches: tuple[BranchSteps, ...] = (),
) -> RequestRecord:
    """A request whose all-token TPOT is `tpot_s`."""
    num_tokens = sum(branch_tokens)
    return RequestRecord(
        name="a request",
        is_forked=forked,
        sent_s=10.0,
        first_token_s=10.0 + ttft_s,
        last_token_s=10.0 + ttft_s + tpot_s * (num_tokens - 1),
        num_tokens=num_tokens,
        num_critical_tokens=max(branch_tokens),
        branches=branches,
    )


def a_step(number: int, **changes: Any) -> dict[str, Any]:
    """One entry of `recent_steps`."""
    step = {
        "step": number,
        "num_requests": 2,
        "num_rows": 5,
        "num_admitted": 3,
        "predicted_ms": 40.0,
        "measured_ms": 50.0,
    }
    return step | changes


COUNTERS = (
    "num_steps",
    "num_deferring_steps",
    "num_rows_admitted",
    "num_rows_deferred",
    "num_branches",
    "num_prefix_shared_tokens",
    "num_recomputed_tokens",
    "num_predicted_steps",
    "sum_absolute_error",
)


def a_state(steps: list[dict[str, Any]], **counters: float) -> dict[str, Any]:
    """What `GET /taper/state` answers, as far as the demo reads it."""
    return {
        "params": {"policy": "taper"},
        "latency_model": {"a_ms": 30.0, "trusted": True},
        "counters": dict.fromkeys(COUNTERS, 0) | counters,
        "recent_steps": steps,
        "recent_prefills": [],
    }
