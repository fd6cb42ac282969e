"""Feed each row's penalties the right token, whether or not it sat out a step.

Under overlap scheduling the token a decode step consumes is still on the device
when the step is prepared, so SGLang's penalties lag one token behind: it takes the
last *processed* one. A row that sat out a step has no token in flight; taking its
last processed token would then skip one and count the next twice. Taking the token
by its position gives every row the same sequence as if it had never been deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def cumulate_penalty_output_tokens_hook(
    original: Callable[[Any], None], batch: Any
) -> None:
    """AROUND `ScheduleBatch.cumulate_penalty_output_tokens`."""
    if not batch.enable_overlap:
        return original(batch)
    # Beam groups have rows of their own past those of the requests.
    num_kv_tokens = batch.seq_lens_cpu[: len(batch.reqs)].tolist()
    tokens = [
        lagging_token(req.origin_input_ids, req.output_ids, length)
        for req, length in zip(batch.reqs, num_kv_tokens, strict=True)
    ]
    ids = torch.tensor(tokens, dtype=torch.int64).to(batch.device, non_blocking=True)
    batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(ids)
    return None


def lagging_token(prompt: Any, output: Any, num_kv_tokens: int) -> int:
    """The token before the one that the next decode step consumes.

    `num_kv_tokens` is the number of tokens whose KV is written, so the step consumes
    token number `num_kv_tokens` (from 0) of prompt + output.
    """
    position = num_kv_tokens - len(prompt) - 1
    return int(output[position] if position >= 0 else prompt[-1])
