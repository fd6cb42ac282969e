"""What the server says about itself: `GET /taper/state` and `meta_info["taper"]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

import sglang_taper
from sglang_taper.engine.groups import Branch, Group
from sglang_taper.engine.headers import id_in
from sglang_taper.policy.admission import policy_names
from sglang_taper.policy.state import RequestState

if TYPE_CHECKING:
    from sglang_taper.engine.controller import BranchController

MAX_REPORTED_GROUPS = 256


def describe_state(controller: BranchController) -> dict[str, Any]:
    """JSON-safe state of one scheduler (docs/operations.md explains each key)."""
    counters = controller.counters
    return {
        "version": sglang_taper.__version__,
        "policies": list(policy_names()),
        "params": describe_params(controller),
        "latency_model": describe_model(controller),
        "stall_share": controller.timer.stalls.share,
        "planner_p99_ms": counters.planner_p99_ms,
        "counters": describe_counters(controller),
        "num_live_groups": controller.groups.num_live_groups,
        "num_pins": len(controller.pins),
        "pinned_tokens": controller.pins.num_tokens,
        "groups": [
            describe_group(name, group)
            for name, group in list(controller.groups.groups.items())[
                -MAX_REPORTED_GROUPS:
            ]
        ],
        "recent_steps": msgspec.to_builtins(list(counters.recent_steps)),
        "recent_prefills": msgspec.to_builtins(list(counters.recent_prefills)),
    }


def describe_params(controller: BranchController) -> dict[str, Any]:
    params: dict[str, Any] = msgspec.to_builtins(controller.params)
    params["rho"] = controller.params.slack_fraction
    return params


def describe_model(controller: BranchController) -> dict[str, Any]:
    model = controller.model
    return {
        **model.to_profile(),
        "trusted": model.trusted,
        "pace": model.pace,
        "mape": model.mape,
        "num_samples": model.num_samples,
        "num_drifts": model.num_drifts,
    }


def describe_counters(controller: BranchController) -> dict[str, Any]:
    skipped = ("recent_steps", "recent_prefills", "planner_ms")
    counters = controller.counters
    described = {
        name: getattr(counters, name)
        for name in counters.__struct_fields__
        if name not in skipped
    }
    described["num_pins_dropped"] = controller.pins.num_dropped
    described["num_pins_expired"] = controller.pins.num_expired
    return described


def describe_group(name: str, group: Group) -> dict[str, Any]:
    return {
        "group": id_in(name),
        "num_live_branches": group.num_live,
        **request_figures(group.state),
    }


def request_figures(state: RequestState) -> dict[str, Any]:
    """How far a request is, its times so far and its SLOs."""
    return {
        "num_tokens": state.num_tokens,
        "ttft_ms": ttft_ms(state),
        "tpot_ms": tpot_ms(state),
        "ttft_slo_ms": state.ttft_slo_ms,
        "tpot_slo_ms": state.tpot_slo_ms,
        "deadline_misses": state.deadline_misses,
    }


def ttft_ms(state: RequestState) -> float | None:
    if state.first_token_ms is None:
        return None
    return float(state.first_token_ms - state.arrival_ms)


def tpot_ms(state: RequestState) -> float | None:
    """SGLang's TPOT over all tokens of the request so far; None below two tokens."""
    if state.first_token_ms is None or state.num_tokens < 2:
        return None
    return float(
        (state.last_progress_ms - state.first_token_ms) / (state.num_tokens - 1)
    )


def describe_branch(branch: Branch, policy: str) -> dict[str, Any]:
    """`meta_info["taper"]` of a finished branch."""
    state, request = branch.state, branch.state.request
    return {
        "group": None if branch.meta.group is None else id_in(branch.meta.group),
        "branch": branch.meta.branch,
        "width": branch.meta.width,
        "policy": policy,
        "steps_run": state.steps_run,
        "steps_deferred": state.steps_deferred,
        "prefix_tokens_shared": branch.num_shared,
        "tokens_recomputed": branch.num_recomputed,
        "prefix_tokens_pinned": branch.num_pinned,
        "prefix_tokens_evicted": branch.num_evicted,
        "tokens_prefilled": branch.num_prefilled,
        "tokens_copied": branch.num_copied,
        "row_aliased": branch.is_aliased,
        "prefill_held_ms": branch.prefill_held_ms,
        "cancelled_by": branch.cancelled_by,
        "deadline_misses": request.deadline_misses,
        "tpot_ms": tpot_ms(request),
    }
