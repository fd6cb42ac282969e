"""A span per branch in SGLang's own OpenTelemetry tracing (`--enable-trace`).

SGLang has closed its spans of a request when we learn that it has ended, so ours go
below its root span through a copy of its context, as its other threads do.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.observability.req_time_stats import convert_time_to_realtime_ns
from sglang.srt.observability.trace import TraceEvent, TraceSliceContext

from sglang_taper.engine.records import BranchRecord

SPAN = "taper_branch"
# As SGLang's own spans of a stage of a request.
LEVEL = 1


def trace_branch(time_stats: Any, record: BranchRecord, now_ms: float) -> None:
    """Emit the span of a branch that has ended; an event for each change of status.

    Nothing where tracing is off, where the request has no group or only commits a
    prefix, or where it never got a token.
    """
    context = getattr(time_stats, "trace_ctx", None)
    if context is None or not context.tracing_enable:
        return
    if record.meta.group is None or record.first_token_ms is None:
        return
    if record.state.max_new_tokens == 0:
        return
    began_ns, ended_ns = _realtime_ns(record.first_token_ms), _realtime_ns(now_ms)
    ours = context.copy_for_thread()
    ours.rebuild_thread_context(began_ns)
    span = TraceSliceContext(
        slice_name=SPAN,
        start_time_ns=began_ns,
        end_time_ns=ended_ns,
        level=LEVEL,
        attrs=attributes_of(record),
        events=[_event(mark) for mark in record.marks],
    )
    ours.trace_slice(span, thread_finish_flag=True)


def _realtime_ns(step_clock_ms: float) -> int:
    return int(convert_time_to_realtime_ns(step_clock_ms / 1000))


def attributes_of(record: BranchRecord) -> dict[str, Any]:
    """Plain values, as OpenTelemetry takes them."""
    meta, state = record.meta, record.state
    return {
        "taper.group": record.shown_request,
        "taper.branch": meta.branch,
        "taper.width": meta.width,
        "taper.depth": meta.depth,
        "taper.stage": meta.stage,
        "taper.parent": meta.parent or "",
        "taper.steps_run": state.steps_run,
        "taper.steps_deferred": state.steps_deferred,
        "taper.output_tokens": state.output_tokens,
        "taper.finish": record.finish or "",
    }


def _event(mark: Any) -> TraceEvent:
    known = {
        "step": mark.step,
        "reason": mark.reason,
        "budget_ms": mark.budget_ms,
        "urgent": mark.urgent,
        "urgent_slack_ms": mark.urgent_slack_ms,
    }
    attrs = {f"taper.{key}": value for key, value in known.items() if value is not None}
    return TraceEvent(mark.status, _realtime_ns(mark.now_ms), attrs)
