"""Enough branches of a fork have finished: its others are cancelled at once.

`first_k` of the metadata says how many are enough. What runs ends with its next decode
step, which is the soonest that SGLang frees a row; what waits ends now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_taper.engine.scheduler import TaperScheduler
    from sglang_taper.engine.siblings import Fork

FIRST_K = "first_k"


def finish_reason(fork: Fork) -> FINISH_ABORT:
    """Why a branch of `fork` ends: type `abort`, because OpenAI's routes know no other.

    Without a status code, so that SGLang answers with it instead of an error.
    """
    return FINISH_ABORT(
        f"{FIRST_K}: {fork.num_finished} of {fork.width} branches have finished"
    )


def is_unwanted(req: Req) -> bool:
    """Whether `req` lives, and enough of its siblings have finished."""
    fork = getattr(req, "taper", None) and req.taper.fork
    return bool(fork and fork.is_decided and not req.taper.ended)


def end_with_next_pass(req: Req) -> None:
    """Let the next results of `req` be its last."""
    req.taper.cancelled_by = FIRST_K
    req.to_finish = finish_reason(req.taper.fork)


def cancel_unwanted(engine: TaperScheduler, reqs: Iterable[Req]) -> None:
    """Cancel those of `reqs` whose fork has been decided; nothing is to be decided."""
    engine.taper.decided.clear()
    in_flight = engine.collect_inflight_reqs() - {engine.chunked_req}
    for req in reqs:
        if not is_unwanted(req) or req.finished():
            continue
        if req in in_flight:
            end_with_next_pass(req)
        else:
            _abort(engine, req)


def _abort(engine: Any, req: Req) -> None:
    reason = finish_reason(req.taper.fork)
    req.taper.cancelled_by = FIRST_K
    engine.abort_request(AbortReq(rid=req.rid, finished_reason=reason.to_json()))
    # One that waits for its grammar has been given another reason.
    if req.to_finish is not None:
        req.to_finish = reason
