"""The running batch becomes what a policy sees: reads only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_taper.engine.clock import TaperTick
from sglang_taper.policy.prefill import OFF
from sglang_taper.policy.state import BranchState, StepBuilder
from sglang_taper.policy.types import PolicyParams, StepView

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def observe_batch(
    builder: StepBuilder,
    batch: ScheduleBatch,
    states: list[BranchState],
    step: int,
    tick: TaperTick,
    params: PolicyParams,
    queue: Sequence[Any],
) -> StepView:
    """A view of all rows of `batch`; `states` are theirs, in the same order.

    `queue` is what waits for prefill: for room, or because it is held.
    """
    waiting = queue
    if params.prefill_hold_s != OFF:
        waiting = [req for req in queue if req.taper.is_let_go]
    return builder.build(
        states,
        context_tokens=batch.seq_lens_cpu.tolist(),
        must_run=rows_that_must_run(batch),
        now_ms=tick.now_ms,
        step=step,
        params=params,
        model=tick.model,
        num_waiting_prefill=len(waiting),
        stall_share=tick.stall_share,
        mean_stall_ms=tick.mean_stall_ms,
        waiting_ttft_share=_waiting_ttft_share(waiting, tick.now_ms),
    )


def not_read_once(view: StepView) -> StepView:
    """The same step, if each row reads what it shares."""
    model = msgspec.structs.replace(view.model, shared_read_once=False)
    return msgspec.structs.replace(view, model=model)


def _waiting_ttft_share(waiting: Sequence[Any], now_ms: float) -> float:
    """As `StepView` has it, of the first that waits for a first token: SGLang's queue
    is, by default, in order of arrival."""
    for req in waiting:
        request = req.taper.state.request
        if request.first_token_ms is None:
            return max(0.0, now_ms - request.arrival_ms) / request.ttft_slo_ms
    return 0.0


def rows_that_must_run(batch: ScheduleBatch) -> list[int]:
    """Rows with a pending abort: SGLang frees them after their next step."""
    return [i for i, req in enumerate(batch.reqs) if req.to_finish is not None]


def every_row_must_run(batch: ScheduleBatch) -> bool:
    """Beam groups append rows of their own to the batch, which no view can select."""
    return any(req.beam_group is not None for req in batch.reqs)
