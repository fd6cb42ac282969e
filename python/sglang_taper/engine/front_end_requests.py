"""A request for a front end: what is accepted, and the requests of its parts.

The front end is named in `custom_params.taper.front_end`, or for clients that can not
change their bodies in the header `x-taper-front-end`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_taper.engine.requests import META_FIELD, custom_params_of, sibling_seed
from sglang_taper.errors import FieldError
from sglang_taper.front_ends.registry import make_front_end
from sglang_taper.front_ends.types import Part
from sglang_taper.ids import new_group, new_rid
from sglang_taper.protocol import (
    CUSTOM_PARAMS_KEY,
    FRONT_END_HEADER,
    MAX_DEPTH,
    BranchMeta,
    fork_meta,
    parse_branch_meta,
    with_metadata,
)

FIELD = f"{META_FIELD}.front_end"
# On the requests of the parts, which come with the headers of the whole request.
_IS_PART = "taper_is_part"
# What has no meaning for an answer that is made of several.
_REFUSED_FIELDS = (
    *("return_logprob", "return_hidden_states", "return_routed_experts"),
    *("return_sampling_mask", "return_indexer_topk", "return_entropy"),
    *("input_embeds", "session_params", "positional_embed_overrides", "image_data"),
    *("video_data", "audio_data"),
)
_REFUSED_PARAMS = ("json_schema", "regex", "ebnf", "structural_tag")


def front_end_of(obj: Any, headers: Mapping[str, str] | None) -> str | None:
    """The name of the front end that a request asks for. The body wins."""
    if not isinstance(obj, GenerateReqInput) or hasattr(obj, _IS_PART):
        return None
    name = _named_in_body(obj.sampling_params)
    return name or (headers or {}).get(FRONT_END_HEADER)


def _named_in_body(params: Any) -> Any:
    if isinstance(params, list):
        return next(filter(None, map(_named_in_body, params)), None)
    meta = (custom_params_of(params) or {}).get(CUSTOM_PARAMS_KEY)
    return meta.get("front_end") if isinstance(meta, Mapping) else None


def check_front_end(obj: Any, headers: Mapping[str, str] | None) -> None:
    """Raise FieldError where a request can not have the front end it asks for."""
    name = front_end_of(obj, headers)
    if name is not None:
        checked_meta(obj, name)


def checked_meta(obj: GenerateReqInput, name: str) -> BranchMeta:
    """Metadata of a request for front end `name`; raises FieldError as above."""
    make_front_end(name, FIELD)
    params = obj.sampling_params
    if isinstance(params, list) or not _is_one_prompt(obj):
        raise FieldError(FIELD, name, "one prompt per request")
    params = {} if params is None else params
    for field in ("n", "beam_width"):
        if params.get(field) not in (None, 1):
            raise FieldError(field, params[field], f"1 with front end {name}")
    bound = params.get("max_new_tokens")
    if isinstance(bound, int | float) and bound < 0:
        raise FieldError("max_new_tokens", bound, "at least 0")
    for field in _REFUSED_FIELDS:
        if getattr(obj, field):
            raise FieldError(field, getattr(obj, field), f"not with front end {name}")
    for field in _REFUSED_PARAMS:
        if params.get(field):
            raise FieldError(field, params[field], f"not with front end {name}")
    return _own_meta(params, name)


def _is_one_prompt(obj: GenerateReqInput) -> bool:
    if obj.text is not None:
        return isinstance(obj.text, str)
    return bool(obj.input_ids) and not isinstance(obj.input_ids[0], list)


def _own_meta(params: Any, name: str) -> BranchMeta:
    raw = (custom_params_of(params) or {}).get(CUSTOM_PARAMS_KEY)
    meta = BranchMeta() if raw is None else parse_branch_meta(raw, META_FIELD)
    if meta.depth >= MAX_DEPTH:
        accepted = f"less than {MAX_DEPTH} with front end {name}"
        raise FieldError(f"{META_FIELD}.depth", meta.depth, accepted)
    if meta.first_k is not None:
        accepted = f"not with front end {name}"
        raise FieldError(f"{META_FIELD}.first_k", meta.first_k, accepted)
    group = meta.group or new_group()
    return msgspec.structs.replace(meta, group=group, front_end=None)


def part_metas(
    base: BranchMeta, width: int, num_forks: int, parent: str | None
) -> list[BranchMeta]:
    """Metadata of the parts of a stage: a serial one is the request itself, the others
    are its branches. `num_forks` so far, this stage included; `parent` is the rid of
    the last serial part. Raises FieldError for too many stages.
    """
    base = msgspec.structs.replace(base, stage=base.stage + num_forks)
    if width == 1:
        return [base]
    return fork_meta(base, width, base.stage, parent or base.parent, field=META_FIELD)


def bound_of(params: Mapping[str, Any], preferred: Mapping[str, Any] | None) -> Any:
    """`max_new_tokens` as SGLang takes it; `preferred` is the server's own default."""
    given = {**(preferred or {}), **params}
    return given.get("max_new_tokens", SamplingParams().max_new_tokens)


def part_request(
    obj: GenerateReqInput,
    part: Part,
    ids: list[int],
    meta: BranchMeta,
    max_new_tokens: int | None,
    seed_index: int,
) -> GenerateReqInput:
    """The request that generates `part` of `obj`, which stays as it is.

    `seed_index` 0 has the seed of `obj`, others one that follows from it.
    """
    request = copy.copy(obj)
    setattr(request, _IS_PART, True)
    request.text, request.input_ids = None, ids
    request.rid = new_rid()
    own = dict(obj.sampling_params or {})
    params = {**own, **part.sampling_params, "max_new_tokens": max_new_tokens}
    params["stop"] = [*part.stop, *_as_list(own.get("stop"))] or None
    params["no_stop_trim"] = True
    if own.get("sampling_seed") is not None:
        params["sampling_seed"] = sibling_seed(own["sampling_seed"], seed_index)
    request.sampling_params = with_metadata(params, meta.to_wire())
    return request


def _as_list(stop: Any) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)
