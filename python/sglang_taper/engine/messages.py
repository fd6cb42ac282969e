"""Control messages between a tokenizer process and the schedulers.

They ride SGLang's ordinary request channel, so every tensor-parallel rank handles
them at the same place of the same iteration. The answer goes back to the tokenizer
worker that asked: `SenderWrapper.send_output(answer, request)` copies the request's
`http_worker_ipc`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

# Actions that are answered with something else than the state.
LIVE, EXPLAIN = "live", "explain"


class TaperControlReq(BaseReq):
    """Ask the scheduler for its state, or to change it first.

    `action`: `state`, `policy` (apply `params`: any of policy, cap, rho, deadline,
    utility, ttft_slo_ms, tpot_slo_ms), `abort_group` (`params["group"]`), `live`
    (`params["after_step"]`) or `explain` (`params["id"]`).
    """

    action: str = "state"
    params: dict[str, Any] = msgspec.field(default_factory=dict)


class TaperControlReqOutput(BaseReq):
    """The answer: `error` is None or one sentence; `state` is JSON-safe."""

    error: str | None = None
    state: dict[str, Any] = msgspec.field(default_factory=dict)


def register_message_types() -> None:
    """Let this process decode our messages with `SGLANG_USE_PICKLE_IPC=0`.

    Done on import, because also processes that only pass messages on must have it:
    the router of several tokenizer workers, the data-parallel controller. Calling it
    again changes nothing.
    """
    hook_custom_types(TaperControlReq, TaperControlReqOutput)


register_message_types()
