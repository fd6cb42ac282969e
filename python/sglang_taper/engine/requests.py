"""Branch metadata in the tokenizer process, before a request and after its answer.

`prepare` checks what the client sent, `assign_groups_hook` gives each prompt of an
`n>1` call a group, `number_sibling_hook` numbers the copies SGLang makes of it, and
`report_branch_hook` puts the scheduler's figures into the answer. SGLang repeats one
dict for all siblings, so everything written here goes into a copy.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput

from sglang_taper.engine.clock import monotonic_ms
from sglang_taper.engine.headers import scope_of, slos_from_headers
from sglang_taper.errors import FieldError
from sglang_taper.ids import new_group
from sglang_taper.protocol import (
    ARRIVED_KEY,
    CALLED_KEY,
    CUSTOM_PARAMS_KEY,
    MAX_DEPTH,
    MAX_WIDTH,
    META_INFO_KEY,
    SCOPE_KEY,
    BranchMeta,
    check_first_k,
    parse_branch_meta,
    with_metadata,
)

META_FIELD = f"custom_params.{CUSTOM_PARAMS_KEY}"


class SiblingMeta(dict[str, Any]):
    """Metadata shared by the siblings of one `n>1` prompt; hands out their indices.

    SGLang carries this very object to the warm-up request and to each sibling, so
    the count lives exactly as long as the call. Pickles as a plain dict.
    """

    def __init__(self, meta: BranchMeta) -> None:
        super().__init__(meta.to_wire())
        self[CALLED_KEY] = monotonic_ms()
        self._warmed_up = False
        self._num_siblings = 0

    def take(self, prefix_only: bool) -> dict[str, Any]:
        """A plain copy for the next request sent: the warm-up, then branch 0, 1, ..."""
        if prefix_only and not self._warmed_up:
            self._warmed_up = True
            return {**self, "branch": 0}
        self._num_siblings += 1
        return {**self, "branch": self._num_siblings - 1}

    def __reduce__(self) -> tuple[type[dict], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def prepare(obj: GenerateReqInput, headers: Mapping[str, str] | None = None) -> None:
    """Check the metadata of a request not yet normalised and add what its headers say:
    SLOs, and whose it is (`obj.taper_scope`). A request that is part of a call of
    ours has the time of that call in `obj.taper_called_ms`, which travels with it.

    `obj.sampling_params` is replaced by copies where there is metadata; what the
    caller passed stays as it was. Raises FieldError naming field, value and range.
    """
    slos = slos_from_headers(headers or {})
    obj.taper_scope = scope_of(headers or {})  # type: ignore[attr-defined]
    given = obj.sampling_params
    if isinstance(given, list):
        obj.sampling_params = [
            _prepared(params, slos, f"sampling_params[{i}].{META_FIELD}")
            for i, params in enumerate(given)
        ]
    elif given is not None or slos:
        params = {} if given is None else given
        obj.sampling_params = _prepared(params, slos, META_FIELD)
    if (called_ms := getattr(obj, "taper_called_ms", None)) is not None:
        meta = obj.sampling_params["custom_params"][CUSTOM_PARAMS_KEY]
        stamped = {**meta, CALLED_KEY: called_ms}
        obj.sampling_params = with_metadata(obj.sampling_params, stamped)


def _prepared(params: Any, slos: Mapping[str, float], field: str) -> Any:
    custom = custom_params_of(params)
    if custom is None:
        return params
    meta = _meta_in(custom, field)
    _check_fork(params.get("n"), meta, field)
    if CUSTOM_PARAMS_KEY not in custom and not slos:
        return params
    missing = {key: ms for key, ms in slos.items() if getattr(meta, key) is None}
    return with_metadata(params, msgspec.structs.replace(meta, **missing).to_wire())


def custom_params_of(params: Any) -> dict[str, Any] | None:
    """The `custom_params` of a request's sampling parameters, {} when it has none.

    None where there is no place for metadata: SGLang itself refuses those.
    """
    custom = params.get("custom_params") if isinstance(params, dict) else 0
    if custom is None:
        return {}
    return custom if isinstance(custom, dict) else None


def _meta_in(custom: Mapping[str, Any], field: str) -> BranchMeta:
    raw = custom.get(CUSTOM_PARAMS_KEY)
    return BranchMeta() if raw is None else parse_branch_meta(raw, field)


def _check_fork(n: Any, meta: BranchMeta, field: str) -> None:
    """Is there room for n siblings one level below? Other n are SGLang's to refuse."""
    if not isinstance(n, int) or n <= 1:
        return check_first_k(meta, meta.width, field)
    if n > MAX_WIDTH:
        raise FieldError("n", n, f"an integer from 1 to {MAX_WIDTH}")
    if meta.depth >= MAX_DEPTH:
        accepted = f"less than {MAX_DEPTH} when n is {n}"
        raise FieldError(f"{field}.depth", meta.depth, accepted)
    return check_first_k(meta, n, field)


def assign_groups_hook(_: None, obj: GenerateReqInput) -> None:
    """AFTER `normalize_batch_and_arguments`: own metadata for every item of a batch.

    With `n>1` each prompt without a group gets one, and its siblings are one fork
    below it (`depth` + 1, `width` = n). The request has been through `prepare`.
    """
    if not obj.is_single:
        _give_each_its_own(obj)
    _name_owner(obj)


def _give_each_its_own(obj: GenerateReqInput) -> None:
    num_samples = obj.parallel_sample_num
    if num_samples == 1:
        obj.sampling_params = [_unshared(params) for params in obj.sampling_params]
    else:
        prompts = obj.sampling_params[: obj.batch_size]
        obj.sampling_params = [_fork(p, num_samples) for p in prompts] * num_samples


def _name_owner(obj: GenerateReqInput) -> None:
    """Written into the metadata itself, which is ours by now: siblings share it."""
    scope = getattr(obj, "taper_scope", "")
    given = obj.sampling_params
    for params in (given if isinstance(given, list) else [given]) if scope else ():
        meta = (custom_params_of(params) or {}).get(CUSTOM_PARAMS_KEY) or {}
        if "group" in meta:
            meta[SCOPE_KEY] = scope


def _unshared(params: Any) -> Any:
    custom = custom_params_of(params)
    if not custom or CUSTOM_PARAMS_KEY not in custom:
        return params
    return with_metadata(params, dict(custom[CUSTOM_PARAMS_KEY]))


def _fork(params: Any, width: int) -> Any:
    custom = custom_params_of(params)
    if custom is None:
        return params
    meta = _meta_in(custom, META_FIELD)
    group = meta.group or new_group()
    child = msgspec.structs.replace(
        meta, group=group, branch=0, width=width, depth=meta.depth + 1
    )
    return with_metadata(params, SiblingMeta(child))


def prepare_request_hook(
    manager: Any, obj: Any, request: Request | None = None
) -> None:
    """Before `generate_request`, unless a front end serves it: metadata is checked."""
    if isinstance(obj, GenerateReqInput):
        prepare(obj, getattr(request, "headers", None))


def number_sibling_hook(manager: Any, tokenized: Any) -> None:
    """BEFORE `TokenizerManager._send_one_request`: a sibling's own index and seed, and
    when the request came.

    All copies of an `n>1` prompt arrive here, in the order of the answer's indices,
    with one shared `SamplingParams`; the warm-up (`max_new_tokens` 0) comes first.
    """
    params = tokenized.sampling_params
    custom = getattr(params, "custom_params", None)
    if isinstance(custom, dict) and isinstance(
        shared := custom.get(CUSTOM_PARAMS_KEY), SiblingMeta
    ):
        _number_sibling(tokenized, custom, shared)
    if isinstance(tokenized, TokenizedGenerateReqInput):
        _stamp_arrival(tokenized)


def _number_sibling(
    tokenized: Any, custom: dict[str, Any], shared: SiblingMeta
) -> None:
    params = tokenized.sampling_params
    own = shared.take(prefix_only=params.max_new_tokens == 0)
    tokenized.sampling_params = copy.copy(params)
    tokenized.sampling_params.custom_params = {**custom, CUSTOM_PARAMS_KEY: own}
    if params.sampling_seed is not None:
        seed = sibling_seed(params.sampling_seed, own["branch"])
        tokenized.sampling_params.sampling_seed = seed


def _stamp_arrival(tokenized: TokenizedGenerateReqInput) -> None:
    """The scheduler does not get SGLang's own stamp, and ranks would read another time
    each, so it travels with our metadata."""
    params = tokenized.sampling_params
    custom = {} if params.custom_params is None else params.custom_params
    if not isinstance(custom, dict):
        return
    meta = custom.get(CUSTOM_PARAMS_KEY) or {}
    created_s = tokenized.time_stats.created_time
    stamped = {**meta, ARRIVED_KEY: 1000 * created_s or monotonic_ms()}
    tokenized.sampling_params = copy.copy(params)
    tokenized.sampling_params.custom_params = {**custom, CUSTOM_PARAMS_KEY: stamped}


def sibling_seed(seed: int, branch: int) -> int:
    """The sampling seed of one sample of `n>1`, from the one its call was given.

    Branch 0 keeps `seed`: it says what the call with `n=1` would. The others get a
    hash of both, in the range SGLang accepts, so that samples differ and a call can
    be repeated.
    """
    if branch == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {branch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def report_branch_hook(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    finish_reason: Any,
) -> None:
    """AROUND `update_request_meta_info`: `meta_info["taper"]` as a dict.

    SGLang accumulates customized info in lists, one entry per output token, and cuts
    them for incremental streams; ours is one dict that comes with the last output.
    """
    others = {k: v for k, v in customized_info.items() if k != META_INFO_KEY}
    original(manager, meta_info, state, others, index, finish_reason)
    ours = customized_info.get(META_INFO_KEY)
    if ours and ours[index]:
        meta_info[META_INFO_KEY] = ours[index][-1]


def report_choices_hook(
    response: Any, serving: Any, request: Any, ret: list[dict[str, Any]], created: int
) -> None:
    """AFTER the OpenAI response builders: `metadata["taper"]`, one entry per choice.

    Changes the response in place, and only when a choice belongs to a group. Error
    responses have no `metadata` and stay as they are.
    """
    branches = [item["meta_info"].get(META_INFO_KEY) for item in ret]
    if any(branches) and hasattr(response, "metadata"):
        response.metadata = {**(response.metadata or {}), META_INFO_KEY: branches}
