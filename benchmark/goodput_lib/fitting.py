"""Requests of a workload, made to fit a server; what was changed is in the result."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.workload.requests import PlannedRequest


class Fitted(msgspec.Struct, frozen=True):
    """Requests, the share whose prompt was cut or stretched, the share left out."""

    requests: list[PlannedRequest]
    share_clipped: float
    share_dropped: float


def fitted(
    requests: Sequence[PlannedRequest],
    prompt_limits: tuple[int, int],
    max_tokens: float,
) -> Fitted:
    """Prompts within `prompt_limits`; without requests longer than `max_tokens`.

    A request's length is its prompt and all its tokens. Raises FieldError when none
    is left.
    """
    clipped = [_clipped(request, *prompt_limits) for request in requests]
    kept = [request for request in clipped if _num_tokens(request) <= max_tokens]
    if not kept:
        accepted = f"some request of at most {max_tokens:g} tokens"
        raise FieldError("--max-request-tokens", max_tokens, accepted)
    num_clipped = sum(a is not b for a, b in zip(requests, clipped, strict=True))
    return Fitted(
        kept, num_clipped / len(requests), (len(requests) - len(kept)) / len(requests)
    )


def _num_tokens(request: PlannedRequest) -> int:
    return request.shape.prompt_tokens + request.shape.num_tokens


def _clipped(request: PlannedRequest, low: int, high: int) -> PlannedRequest:
    tokens = min(max(request.shape.prompt_tokens, low), high)
    if tokens == request.shape.prompt_tokens:
        return request
    shape = msgspec.structs.replace(request.shape, prompt_tokens=tokens)
    return msgspec.structs.replace(request, shape=shape)
