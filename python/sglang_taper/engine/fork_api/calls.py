"""The requests of SGLang that a fork is made of, checked before the first is sent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request
from sglang.srt.entrypoints.api_contract import generate_contract_error
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_taper.engine.clock import monotonic_ms
from sglang_taper.engine.fork_api.prompts import (
    Piece,
    Source,
    added,
    check_part,
    prompt_of,
    root_after,
    source_of,
)
from sglang_taper.engine.fork_api.schema import Continuation, ForkRequest
from sglang_taper.engine.requests import sibling_seed
from sglang_taper.errors import FieldError
from sglang_taper.ids import new_rid
from sglang_taper.protocol import (
    CUSTOM_PARAMS_KEY,
    MAX_STAGE,
    MAX_WIDTH,
    BranchMeta,
    fork_meta,
    with_metadata,
)

# Far from the stages that a program counts itself, should it have forked the same
# request: two forks of one parent must not have the same number.
_stages: Iterator[int] = itertools.cycle(range(MAX_STAGE // 2, MAX_STAGE))

_LOGPROB_FIELDS = (
    *("return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("token_ids_logprob", "return_text_in_logprobs"),
)


class Branch(NamedTuple):
    """A branch: what it adds, and the request that computes it."""

    pieces: tuple[Piece, ...]
    request: GenerateReqInput


class ForkCall(NamedTuple):
    """A checked call. The join's request can be made only when the branches ended."""

    source: Source
    stage: int
    branches: list[Branch]
    join: Continuation | None
    sampling_params: dict[str, Any]
    stream: bool
    called_ms: float

    @property
    def group(self) -> str:
        assert self.source.meta.group is not None
        return self.source.meta.group


async def make_call(body: ForkRequest, manager: Any, request: Request) -> ForkCall:
    """Everything `body` asks for. Raises FieldError naming field, value and range."""
    if not 1 <= (width := len(body.branches)) <= MAX_WIDTH:
        raise FieldError("body.branches", width, f"1 to {MAX_WIDTH} of them")
    called_ms = monotonic_ms()
    _check_names(body)
    _check_sampling_params(body, manager)
    source = await source_of(body, manager, request)
    stage = next(_stages) if source.parent else 1
    metas = fork_meta(
        source.meta, width, stage, source.parent, first_k=body.first_k, field="body"
    )
    branches = [_branch(body, source, i, meta, manager) for i, meta in enumerate(metas)]
    params = body.sampling_params
    return ForkCall(source, stage, branches, body.join, params, body.stream, called_ms)


def _branch(
    body: ForkRequest, source: Source, index: int, meta: BranchMeta, manager: Any
) -> Branch:
    part = body.branches[index]
    pieces = added(part, f"body.branches[{index}]")
    params = dict(body.sampling_params)
    if (seed := params.get("sampling_seed")) is not None:
        params["sampling_seed"] = sibling_seed(seed, index)
    prompt = prompt_of((*source.pieces, *pieces), manager)
    return Branch(pieces, _request(part, prompt, params, meta, body.stream))


def join_request(
    call: ForkCall, parts: Sequence[Piece], manager: Any
) -> GenerateReqInput:
    """The request that goes on when `parts`, what the branches are, are written."""
    assert call.join is not None
    pieces = (*call.source.pieces, *parts, *added(call.join, "body.join"))
    meta = root_after(call.source, call.stage)
    prompt = prompt_of(pieces, manager)
    return _request(call.join, prompt, call.sampling_params, meta, call.stream)


def _request(
    part: Continuation,
    prompt: Mapping[str, Any],
    defaults: Mapping[str, Any],
    meta: BranchMeta,
    stream: bool,
) -> GenerateReqInput:
    params = {**defaults, **(part.sampling_params or {})}
    return GenerateReqInput(
        **prompt,
        **{name: getattr(part, name) for name in _LOGPROB_FIELDS},
        sampling_params=with_metadata(params, meta.to_wire()),
        rid=part.rid or new_rid(),
        stream=stream,
    )


def _parts(body: ForkRequest) -> Iterator[tuple[str, Continuation]]:
    for index, part in enumerate(body.branches):
        yield f"body.branches[{index}]", part
    if body.join is not None:
        yield "body.join", body.join


def _check_names(body: ForkRequest) -> None:
    seen: set[str] = set()
    for field, part in _parts(body):
        if part.rid in seen:
            raise FieldError(f"{field}.rid", part.rid, "an id of its own")
        if part.rid is not None:
            seen.add(part.rid)


def _check_sampling_params(body: ForkRequest, manager: Any) -> None:
    check_params(body.sampling_params, "body.sampling_params", manager)
    for field, part in _parts(body):
        if part.sampling_params:
            params = {**body.sampling_params, **part.sampling_params}
            check_params(params, f"{field}.sampling_params", manager)
        added(part, field)
        check_part(part, field, manager)


def check_params(params: Mapping[str, Any], field: str, manager: Any) -> None:
    """Raise FieldError unless SGLang accepts these parameters for one sample."""
    for name in ("n", "beam_width"):
        if params.get(name) not in (None, 1):
            accepted = "1: each branch is one sample"
            raise FieldError(f"{field}.{name}", params[name], accepted)
    custom = params.get("custom_params") or {}
    if not isinstance(custom, Mapping):
        raise FieldError(f"{field}.custom_params", custom, "an object")
    if CUSTOM_PARAMS_KEY in custom:
        accepted = "absent: the server writes it"
        key = f"{field}.custom_params.{CUSTOM_PARAMS_KEY}"
        raise FieldError(key, custom[CUSTOM_PARAMS_KEY], accepted)
    problem = generate_contract_error({"text": "", "sampling_params": dict(params)})
    if problem is not None:
        raise FieldError(field, params, problem)
    try:
        made = manager.sampling_params_class(**params)
        made.normalize(manager.tokenizer)
        made.verify(manager.model_config.vocab_size)
    except (ArithmeticError, TypeError, ValueError, re.error) as error:
        raise FieldError(field, params, str(error)) from error
