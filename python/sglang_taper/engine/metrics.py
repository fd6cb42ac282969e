"""Our metrics in SGLang's own Prometheus endpoint, prefix `sglang_taper:`.

Counters are fed from plain numbers once per step, never per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_taper.engine.controller import BranchController

PREFIX = "sglang_taper:"
COUNTERS = {
    "num_steps": "Decode steps planned.",
    "num_deferring_steps": "Decode steps that left out at least one row.",
    "num_rows_admitted": "Rows admitted, summed over decode steps.",
    "num_rows_deferred": "Rows deferred, summed over decode steps.",
    "num_branches": "Branches that arrived.",
    "num_prefix_shared_tokens": "Tokens branches found in the radix tree.",
    "num_recomputed_tokens": "Tokens of a shared prefix that were computed again.",
    "num_evicted_tokens": "Tokens of a shared prefix evicted before they were wanted.",
    "num_prefilled_tokens": "Prompt tokens of branches that went through a prefill.",
    "num_copied_tokens": "Tokens copied from the partly filled page of a sibling.",
    "num_rows_aliased": "Branches that started without a prefill.",
    "num_alias_fallbacks": "Branches whose parameters need the prefill of a token.",
    "num_checkpoints": "Times a running branch was put into the tree for a fork.",
    "num_siblings_held": "Passes in which a branch waited for its sibling's prefill.",
    "num_groups_held": "Passes in which a fork waited until it fits as a whole.",
    "num_prefills_held": "Requests whose prefill was held (--prefill-hold-s).",
    "sum_prefill_held_ms": "Milliseconds for which prefills were held, summed.",
    "num_measured_steps": "Decode steps whose end was seen.",
    "sum_measured_ms": "Milliseconds of these steps, summed.",
    "num_predicted_steps": "Of these, steps with a prediction.",
    "sum_predicted_ms": "Their predicted milliseconds, summed.",
    "sum_absolute_error": "Their absolute relative errors, summed.",
    "num_requests_ended": "Requests that can not go on any more.",
    "num_requests_in_slo": "Of these, requests within their TTFT and TPOT SLO.",
    "num_tokens_ended": "Tokens of requests that can not go on any more.",
    "num_tokens_in_slo": "Tokens of requests within their SLOs.",
}
# One per binding constraint, label `reason`.
STEPS_BY_REASON = "steps_by_reason"
GAUGES = {
    "live_groups": "Requests with a living branch.",
    "pins": "Locks on the prefix of a fork.",
    "pinned_tokens": "Tokens under these locks, summed over them.",
    "num_rows": "Rows in the decode batch of the last step.",
    "num_admitted": "Rows that ran in it.",
    "budget_ms": "What the last step with a budget might take.",
    "min_slack_ms": "Smallest slack in the last step that protected a request.",
    "stall_share": "Share of busy time that is not decode steps.",
    "latency_model_mape": "Mean absolute relative error of the step-latency model.",
    "latency_model_drifts": "Times the engine was found to have changed its speed.",
    "latency_model_trusted": "1 when plans use the step-latency model, else 0.",
}


class StepMetrics:
    """Does nothing unless `enabled` (`--enable-metrics`, on the reporting rank)."""

    def __init__(self, enabled: bool) -> None:
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._reasons: Any = None
        self._last_reasons: dict[str, int] = {}
        self._last: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        if enabled:
            self._create()

    def _create(self) -> None:
        # Imported late: the client picks its multi-process directory at import.
        from prometheus_client import Counter, Gauge

        for name, help in COUNTERS.items():
            self._counters[name] = Counter(PREFIX + name, help)
        self._reasons = Counter(
            PREFIX + STEPS_BY_REASON, "Decode steps by what bound them.", ["reason"]
        )
        for name, help in GAUGES.items():
            self._gauges[name] = Gauge(
                PREFIX + name, help, multiprocess_mode="mostrecent"
            )

    def update(self, controller: BranchController) -> None:
        """Bring the metrics up to date. Called once per processed result."""
        if not self._counters:
            return
        for name, counter in self._counters.items():
            total = getattr(controller.counters, name)
            counter.inc(total - self._last[name])
            self._last[name] = total
        for reason, total in controller.counters.reasons.items():
            more = total - self._last_reasons.get(reason, 0)
            self._reasons.labels(reason=reason).inc(more)
        self._last_reasons = dict(controller.counters.reasons)
        for name, value in _gauge_values(controller).items():
            self._gauges[name].set(value)


def _gauge_values(controller: BranchController) -> dict[str, float]:
    return _step_values(controller) | {
        "live_groups": controller.groups.num_live_groups,
        "pins": len(controller.pins),
        "pinned_tokens": controller.pins.num_tokens,
        "stall_share": controller.timer.stalls.share,
        "latency_model_mape": controller.model.mape or 0.0,
        "latency_model_drifts": controller.model.num_drifts,
        "latency_model_trusted": float(controller.model.trusted),
    }


def _step_values(controller: BranchController) -> dict[str, float]:
    """Of the last step; without what it has not."""
    steps = controller.counters.recent_steps
    if not steps:
        return {}
    names = ("num_rows", "num_admitted", "budget_ms", "min_slack_ms")
    values = {name: getattr(steps[-1], name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
