"""Token ids travel from a branch to the requests that continue its text.

Two hooks around `token_memory`: one gives a grouped request the ids of the text it
begins with, one remembers what a finished branch has generated. Each tokenizer process
has its own memory; what it does not know is tokenised by SGLang as ever.
"""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sglang.srt.managers.io_struct import BatchStrOutput, GenerateReqInput

from sglang_taper.engine.clock import monotonic_ms
from sglang_taper.engine.headers import name_in
from sglang_taper.engine.requests import custom_params_of
from sglang_taper.engine.token_memory import (
    FinishedBranch,
    TokenMemory,
    coder,
    continued_ids,
)
from sglang_taper.protocol import CUSTOM_PARAMS_KEY

logger = logging.getLogger(__name__)

# On a GenerateReqInput, which SGLang copies for each sample of n>1.
_PROMPT_IDS = "taper_prompt_ids"
# The ids of requests with one of these are not all that the model reads.
_NOT_ONLY_IDS = ("input_embeds", "session_params", "positional_embed_overrides")
# Requests with one of these bring their ids, or name positions in them.
_KEPT_FROM_US = (
    *_NOT_ONLY_IDS,
    *("input_ids", "multi_item_delimiter_indices", "token_indices_to_pool"),
)


async def tokenize_hook(
    original: Callable[..., Awaitable[Any]], manager: Any, obj: Any
) -> Any:
    """AROUND `TokenizerManager._tokenize_one_request`: ids of what is already known.

    A grouped text that begins with what a branch of the group has said gets the ids of
    that branch. Notes on `obj` the ids it was sent with.
    """
    meta = _text_of_group(obj)
    ids = None if meta is None else _known_ids(manager, obj, meta)
    if ids is None:
        tokenized = await original(manager, obj)
    else:
        with_ids = copy.copy(obj)
        with_ids.input_ids = ids
        tokenized = await original(manager, with_ids)
    if isinstance(obj, GenerateReqInput) and _is_only_ids(obj):
        setattr(obj, _PROMPT_IDS, tokenized.input_ids)
    return tokenized


def prompt_ids_of(obj: Any) -> Sequence[int] | None:
    """The ids a request was sent with; None before that, and where they are not all
    that the model reads (images, sessions, embeddings)."""
    ids: Sequence[int] | None = getattr(obj, _PROMPT_IDS, None)
    return ids


def group_meta(obj: Any) -> Mapping[str, Any] | None:
    """The metadata of a generate request of a group, else None."""
    custom = custom_params_of(obj.sampling_params) or {}
    meta = custom.get(CUSTOM_PARAMS_KEY)
    if not isinstance(meta, Mapping) or not isinstance(meta.get("group"), str):
        return None
    return meta


def _is_only_ids(obj: GenerateReqInput) -> bool:
    return _has_none_of(obj, _NOT_ONLY_IDS) and not obj.contains_mm_input()


def _has_none_of(obj: Any, names: Sequence[str]) -> bool:
    return all(getattr(obj, name, None) is None for name in names)


def _text_of_group(obj: Any) -> Mapping[str, Any] | None:
    """The metadata of a request that is one text of a group, else None."""
    if not isinstance(obj, GenerateReqInput) or not isinstance(obj.text, str):
        return None
    if not _has_none_of(obj, _KEPT_FROM_US) or obj.contains_mm_input():
        return None
    return group_meta(obj)


def _known_ids(manager: Any, obj: Any, meta: Mapping[str, Any]) -> list[int] | None:
    if manager.tokenizer is None:
        return None
    branch = memory_of(manager).recall(
        name_in(meta), obj.text, meta.get("parent"), monotonic_ms()
    )
    if branch is None:
        return None
    try:
        return continued_ids(branch, obj.text, *coder(manager.tokenizer))
    except Exception as error:  # a tokenizer of any kind; SGLang's own way is left
        logger.warning("request %s is tokenised anew: %r", obj.rid, error)
        return None


def memory_of(manager: Any) -> TokenMemory:
    """The memory of this tokenizer process, made when first asked for."""
    if not hasattr(manager, "taper_token_memory"):
        manager.taper_token_memory = TokenMemory()
    memory: TokenMemory = manager.taper_token_memory
    return memory


def remember_finished_hook(manager: Any, received: Any) -> None:
    """BEFORE `TokenizerManager._handle_batch_output`: keep what has just ended.

    Before, so that it is known when the client reads the answer and goes on.
    """
    if not isinstance(received, BatchStrOutput):
        return
    for index, rid in enumerate(received.rids):
        if received.finished_reasons[index] is None:
            continue
        state = manager.rid_to_state.get(rid)
        prompt_ids = prompt_ids_of(state.obj) if state else None
        if prompt_ids is not None and group_meta(state.obj) is not None:
            _remember(manager, rid, state, prompt_ids, received, index)


def count_prompt_hook(
    original: Callable[[Any, Any], None], manager: Any, received: Any
) -> None:
    """AROUND `TokenizerManager._handle_abort_req`: `prompt_tokens` of what never ran.

    SGLang leaves it out, and counts the prompt of an `n>1` call as that of its first
    sample, which may be one that was cancelled in the queue.
    """
    state = manager.rid_to_state.get(received.rid)
    original(manager, received)
    if state is None or not state.out_list:
        return
    if (sent := prompt_ids_of(state.obj)) is not None:
        info = state.out_list[-1]["meta_info"]
        info.setdefault("prompt_tokens", len(sent))
        info.setdefault("cached_tokens", 0)


def _remember(
    manager: Any, rid: str, state: Any, prompt_ids: Any, received: Any, index: int
) -> None:
    meta = state.obj.sampling_params["custom_params"][CUSTOM_PARAMS_KEY]
    branch = FinishedBranch(
        rid=rid,
        prompt=state.obj.text if _text_of_group(state.obj) else None,
        answer=state.get_text() + (received.output_strs[index] or ""),
        prompt_ids=prompt_ids,
        output_ids=array("q", [*state.output_ids, *(received.output_ids[index] or ())]),
        meta=meta,
        end=received.finished_reasons[index],
    )
    memory_of(manager).remember(name_in(meta), branch, monotonic_ms())
