"""Start-up calibration: show the latency model a few batch sizes and contexts.

Plain requests through the server's own front door, so that the real engine runs them
and the scheduler's timer sees real steps; about five seconds on a GPU and twenty on
two CPU cores. Skipped with `--latency-profile`. They are gone from the KV cache
before the server says it is ready.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import requests

from sglang_taper.engine.flags import current
from sglang_taper.probe import Cell, Limits, cells_within, flush, show

logger = logging.getLogger(__name__)

STEPS_PER_CELL = 6
BUDGET_S = 20.0
READY_TIMEOUT_S = 120


# Few rows and many, short contexts and long: enough to tell a, b and c apart.
CELLS = (
    Cell(1, 16),
    Cell(8, 16),
    Cell(1, 512),
    Cell(16, 16),
    Cell(4, 256),
    Cell(2, 16),
    Cell(8, 128),
)


def calibrate_before_warmup_hook(
    original: Callable[..., None], server_args: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND `_wait_and_warmup` (its own thread): calibrate, then SGLang's warm-up."""
    config = current()
    wanted = config.enabled and config.latency_profile is None
    if wanted and _claim(server_args.port):
        try:
            calibrate(server_args.url(), _limits())
        except requests.RequestException as error:
            logger.warning("Calibration stopped (%s); the model learns online", error)
    original(server_args, *args, **kwargs)


# Held until this process ends.
_claims: list[socket.socket] = []


def _claim(port: int) -> bool:
    """Whether this process is the one to calibrate the server on `port`.

    With several tokenizer workers each runs its own warm-up; together they would
    show the model batches it never asked for. An abstract socket has one owner and
    leaves nothing behind.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0sglang_taper/calibration/{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def _limits() -> Limits:
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.runtime_context import get_schedule, get_serving

    state = get_global_state()
    return Limits(
        max_rows=get_schedule().max_running_requests or 64,
        max_tokens=int(state.scheduler_info["max_total_num_tokens"]),
        vocab_size=int(state.tokenizer_manager.model_config.vocab_size),
        headers=_bearer(get_serving().api_key),
    )


def _admin_headers() -> dict[str, str]:
    from sglang.srt.runtime_context import get_serving

    return _bearer(get_serving().admin_api_key or get_serving().api_key)


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def calibrate(url: str, limits: Limits) -> int:
    """Show the running server at `url` the cells it can hold; returns how many.

    Stops after `BUDGET_S`. Side effect: flushes the server's cache at the end.
    """
    _wait_until_served(url, limits.headers)
    ends_at = time.monotonic() + BUDGET_S
    shown = 0
    for cell in cells_within(CELLS, STEPS_PER_CELL, limits):
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            break
        show(url, cell, STEPS_PER_CELL, limits, max_s=left_s)
        shown += 1
    flush(url, _admin_headers())
    logger.info("Calibrated the step-latency model on %d batches", shown)
    return shown


def _wait_until_served(url: str, headers: dict[str, str]) -> None:
    ends_at = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            requests.get(f"{url}/model_info", headers=headers, timeout=5)
        except requests.RequestException:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.2)
        else:
            return
