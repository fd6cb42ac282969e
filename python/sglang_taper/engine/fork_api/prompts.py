"""What the branches of a fork continue, as pieces of text and of token ids.

As long as all pieces are text, SGLang tokenises the whole, as it would on `/generate`.
Ids stay as they are, so that what they stand for is found in the radix tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from fastapi import Request
from msgspec.structs import replace
from sglang.srt.entrypoints.openai.protocol import TokenizeRequest, TokenizeResponse

from sglang_taper.engine.clock import monotonic_ms
from sglang_taper.engine.fork_api.schema import Continuation, ForkRequest
from sglang_taper.engine.headers import scope_of
from sglang_taper.engine.token_ids import group_meta, memory_of, prompt_ids_of
from sglang_taper.engine.token_memory import NUM_CONTEXT_IDS, coder, written_ids
from sglang_taper.errors import FieldError
from sglang_taper.ids import new_group
from sglang_taper.protocol import SCOPE_KEY, BranchMeta, parse_branch_meta

Piece = str | Sequence[int]
SOURCES = ("text", "input_ids", "messages", "rid")


class Source(NamedTuple):
    """What is forked: its prompt, its place in the program, its request id if any."""

    pieces: tuple[Piece, ...]
    meta: BranchMeta
    parent: str | None = None


async def source_of(body: ForkRequest, manager: Any, request: Request) -> Source:
    """The prompt that `body` names. Raises FieldError naming what is wrong with it."""
    given = [name for name in SOURCES if getattr(body, name) is not None]
    if len(given) != 1:
        raise FieldError("body", given, f"exactly one of {', '.join(SOURCES)}")
    slos = {
        "ttft_slo_ms": body.ttft_slo_ms,
        "tpot_slo_ms": body.tpot_slo_ms,
        "priority": body.priority,
    }
    if body.rid is not None:
        if body.group is not None:
            raise FieldError("body.group", body.group, "absent where rid is given")
        return _known_request(body.rid, slos, manager, scope_of(request.headers))
    meta = _new_meta(slos, body.group)
    if body.messages is not None:
        return Source((await _ids_of_chat(body.messages, request),), meta)
    piece = body.text if body.text is not None else body.input_ids
    if not piece:
        raise FieldError(f"body.{given[0]}", piece, "at least one token")
    _check_ids(body.input_ids, "body.input_ids", manager)
    return Source((piece,), meta)


def _new_meta(slos: Mapping[str, Any], group: str | None = None) -> BranchMeta:
    return parse_branch_meta({"group": group or new_group(), **slos}, "body")


async def _ids_of_chat(
    messages: list[dict[str, Any]], request: Request
) -> Sequence[int]:
    """The ids that SGLang's chat route would send for these messages."""
    for index, message in enumerate(messages):
        if not isinstance(message.get("content"), str | None):
            field = f"body.messages[{index}].content"
            raise FieldError(field, message["content"], "a text")
    try:
        wanted = TokenizeRequest(messages=messages)
    except ValueError as error:
        accepted = "messages as /v1/chat/completions takes them"
        raise FieldError("body.messages", messages, accepted) from error
    serving = request.app.state.openai_serving_tokenize
    answer = await serving.handle_request(wanted, request)
    if not isinstance(answer, TokenizeResponse):
        problem = orjson.loads(answer.body)["message"]
        raise FieldError("body.messages", messages, problem)
    return list(answer.tokens)


def _known_request(
    rid: str, slos: Mapping[str, Any], manager: Any, scope: str
) -> Source:
    """A request that came with the same credential: others' ids are unknown ones."""
    state = manager.rid_to_state.get(rid)
    found = memory_of(manager).find(rid, monotonic_ms())
    if state is not None and _owner_of(state.obj) == scope:
        if (prompt := prompt_ids_of(state.obj)) is not None:
            meta = group_meta(state.obj)
            place = _meta_of(meta, slos) if meta else _new_meta(slos)
            return Source(((*prompt, *state.output_ids),), place, rid)
    elif found is not None and found.meta.get(SCOPE_KEY, "") == scope:
        before, said = found.prompt_ids, found.output_ids
        said = written_before_end(manager, before, said, found.answer, found.end)
        return Source(((*before, *said),), _meta_of(found.meta, slos), rid)
    raise FieldError(
        "body.rid",
        rid,
        "the id of a request that runs, or of a finished one of a group",
    )


def _owner_of(obj: Any) -> str | None:
    """Whose a live request is; None where that is not known, which is nobody's here.

    SGLang makes an object of its own of each sample and each item of a batch: only
    their metadata is carried over.
    """
    if (meta := group_meta(obj)) is not None:
        return str(meta.get(SCOPE_KEY, ""))
    return getattr(obj, "taper_scope", None)


def _meta_of(sent: Mapping[str, Any], slos: Mapping[str, Any]) -> BranchMeta:
    """Where the known request stands; the rest of its metadata was for itself."""
    place = {k: sent.get(k) for k in ("group", "branch", "width", "depth", "stage")}
    place["parent"] = sent.get("parent")
    return parse_branch_meta({**place, **slos}, "body")


def written_before_end(
    manager: Any,
    before: Sequence[int],
    output_ids: Sequence[int],
    text: str,
    end: Mapping[str, Any],
) -> Sequence[int]:
    """The ids that a request has generated after `before`, without what ended it: the
    token or the string that `end`, its finish reason, says was matched."""
    matched = end.get("matched")
    if isinstance(matched, int) and output_ids and output_ids[-1] == matched:
        return output_ids[:-1]
    if not isinstance(matched, str):
        return output_ids
    # The string may begin within a token: what of that is shown is encoded anew.
    decode, encode = coder(manager.tokenizer)
    context = list(before[-NUM_CONTEXT_IDS:])
    count, num_chars = written_ids(context, list(output_ids), text, decode)
    rest = text[num_chars:]
    return [*output_ids[:count], *(encode(rest) if rest else ())]


def check_part(part: Continuation, field: str, manager: Any) -> None:
    """Raise FieldError for a text where the server has no tokenizer, and for ids that
    the model does not have."""
    if part.text is not None and manager.tokenizer is None:
        accepted = "input_ids: this server has no tokenizer"
        raise FieldError(f"{field}.text", part.text, accepted)
    _check_ids(part.input_ids, f"{field}.input_ids", manager)


def _check_ids(ids: list[int] | None, field: str, manager: Any) -> None:
    # SGLang does not look, and such an id ends its scheduler.
    vocab_size = manager.model_config.vocab_size
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
        return
    index = next(i for i, id in enumerate(ids) if not 0 <= id < vocab_size)
    accepted = f"a token id from 0 to {vocab_size - 1}"
    raise FieldError(f"{field}[{index}]", ids[index], accepted)


def added(part: Continuation, field: str) -> tuple[Piece, ...]:
    """What a branch or a join adds to the prompt: nothing, a text or ids."""
    if part.text is not None and part.input_ids is not None:
        raise FieldError(f"{field}.input_ids", part.input_ids, "absent with a text")
    piece = part.text if part.text is not None else part.input_ids
    return (piece,) if piece else ()


def prompt_of(pieces: Sequence[Piece], manager: Any) -> dict[str, str | list[int]]:
    """`text` or `input_ids` of a request whose prompt is these pieces in order."""
    if all(isinstance(piece, str) for piece in pieces):
        return {"text": "".join(pieces)}  # type: ignore[arg-type]
    ids: list[int] = []
    for piece in pieces:
        ids += _ids_of(piece, manager.tokenizer, is_first=not ids)
    return {"input_ids": ids}


def _ids_of(piece: Piece, tokenizer: Any, is_first: bool) -> Sequence[int]:
    if not isinstance(piece, str):
        return piece
    if is_first:
        # With what the model wants at the start of a text.
        return list(tokenizer.encode(piece))
    return coder(tokenizer)[1](piece)


def root_after(source: Source, stage: int) -> BranchMeta:
    """The metadata of `source` once it has forked: it goes on after the join."""
    meta = replace(source.meta, first_k=None)
    return replace(meta, stage=stage) if meta.depth == 0 else meta
