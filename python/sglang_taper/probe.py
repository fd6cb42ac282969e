"""Batches that a running server is shown so that its scheduler times real steps.

Plain requests through the server's own front door. Used by the start-up calibration
and by `sglang-taper calibrate`.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterable, Sequence

import msgspec
import requests

REQUEST_TIMEOUT_S = 600
# So long a flush waits for what was aborted to be gone.
FLUSH_WAIT_S, FLUSH_TIMEOUT_S = 10, 60
ABORT_TIMEOUT_S = 10
# Request ids of what is shown begin with it: nobody waits for these.
PROBE_RID = "taper-probe-"


class Cell(msgspec.Struct, frozen=True):
    """One batch to show: `num_rows` requests of `num_tokens` prompt tokens each."""

    num_rows: int
    num_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.num_rows * self.num_tokens


class Limits(msgspec.Struct, frozen=True):
    """What the server can hold: rows, tokens in all, tokens of one request (0: as many
    as it has), ids of its vocabulary; and the headers it wants."""

    max_rows: int
    max_tokens: int
    vocab_size: int
    headers: dict[str, str] = {}
    max_request_tokens: int = 0


def cells_within(cells: Iterable[Cell], num_steps: int, limits: Limits) -> list[Cell]:
    """Those that fit into the request slots and half of the KV pool."""
    longest = limits.max_request_tokens or limits.max_tokens
    return [
        cell
        for cell in cells
        if cell.num_rows <= limits.max_rows
        and cell.num_tokens + num_steps <= longest
        and cell.num_rows * (cell.num_tokens + num_steps) <= limits.max_tokens // 2
    ]


def show(
    url: str,
    cell: Cell,
    num_steps: int,
    limits: Limits,
    seed: object = 0,
    max_s: float = REQUEST_TIMEOUT_S,
) -> None:
    """Let the server at `url` generate `num_steps` tokens for each row of `cell`.

    After `max_s`, or when interrupted, what still runs is aborted. Raises
    requests.RequestException when the server fails.
    """
    rng = random.Random(f"{cell.num_rows}x{cell.num_tokens}/{seed}")
    prompts = [
        [rng.randrange(limits.vocab_size) for _ in range(cell.num_tokens)]
        for _ in range(cell.num_rows)
    ]
    call = uuid.uuid4().hex
    rids = [f"{PROBE_RID}{call}-{row}" for row in range(cell.num_rows)]
    sampling = {"max_new_tokens": num_steps, "temperature": 0, "ignore_eos": True}
    is_cut = threading.Event()

    def cut() -> None:
        is_cut.set()
        _abort(url, rids, limits.headers)

    timer = threading.Timer(max_s, cut)
    timer.daemon = True
    timer.start()
    try:
        answer = requests.post(
            f"{url}/generate",
            json={"input_ids": prompts, "rid": rids, "sampling_params": sampling},
            headers=limits.headers,
            timeout=REQUEST_TIMEOUT_S,
        )
    except KeyboardInterrupt:
        cut()
        raise
    finally:
        timer.cancel()
    # Of what was aborted some answers are errors.
    if not is_cut.is_set():
        answer.raise_for_status()


def _abort(url: str, rids: Sequence[str], headers: dict[str, str]) -> None:
    for rid in rids:
        try:
            requests.post(
                f"{url}/abort_request",
                json={"rid": rid},
                headers=headers,
                timeout=ABORT_TIMEOUT_S,
            )
        except requests.RequestException:
            # Whoever waits for the answer learns what is wrong.
            return


def flush(url: str, headers: dict[str, str]) -> None:
    """Forget what was shown, where the server is idle and `headers` allow it."""
    requests.post(
        f"{url}/flush_cache",
        params={"timeout": FLUSH_WAIT_S},
        headers=headers,
        timeout=FLUSH_TIMEOUT_S,
    )
