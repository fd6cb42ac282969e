"""The running batch becomes what a policy sees: reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglang_taper.engine.clock import TaperTick
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
    num_waiting: int,
) -> StepView:
    """A view of all rows of `batch`; `states` are theirs, in the same order."""
    return builder.build(
        states,
        context_tokens=batch.seq_lens_cpu.tolist(),
        must_run=rows_that_must_run(batch),
        now_ms=tick.now_ms,
        step=step,
        params=params,
        model=tick.model,
        num_waiting_prefill=num_waiting,
        stall_share=tick.stall_share,
    )


def not_read_once(view: StepView) -> StepView:
    """The same step, if each row reads what it shares."""
    model = msgspec.structs.replace(view.model, shared_read_once=False)
    return msgspec.structs.replace(view, model=model)


def rows_that_must_run(batch: ScheduleBatch) -> list[int]:
    """Rows with a pending abort: SGLang frees them after their next step."""
    return [i for i, req in enumerate(batch.reqs) if req.to_finish is not None]


def every_row_must_run(batch: ScheduleBatch) -> bool:
    """Beam groups append rows of their own to the batch, which no view can select."""
    return any(req.beam_group is not None for req in batch.reqs)
