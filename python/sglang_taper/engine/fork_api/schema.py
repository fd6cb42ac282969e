"""The body and the answers of `POST /fork`, as OpenAPI shows them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sglang.srt.entrypoints.openai.protocol import UsageInfo

from sglang_taper.protocol import GROUP_PATTERN, MAX_RID_LENGTH, MAX_SLO_MS, MAX_WIDTH

# Shown only: they are checked, with their whole range, by `protocol`.
_SLO: dict[str, Any] = {"exclusiveMinimum": 0, "maximum": MAX_SLO_MS}
_PARAMS = (
    "SGLang's sampling parameters, as on /generate: max_new_tokens, temperature, stop, "
    "json_schema, regex, sampling_seed, ...; not n and not beam_width."
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Continuation(_Strict):
    """What one branch adds to the prompt, and how it goes on."""

    text: str | None = Field(None, description="Text after the prompt.")
    input_ids: list[int] | None = Field(
        None, description="Token ids after the prompt, instead of a text."
    )
    sampling_params: dict[str, Any] | None = Field(
        None, description=f"Over those of the whole call. {_PARAMS}"
    )
    rid: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_RID_LENGTH,
        description="Its request id, for /abort_request; else the server names it.",
    )
    return_logprob: bool = Field(False, description="Whether events have `logprobs`.")
    logprob_start_len: int = Field(
        -1, ge=-1, description="First prompt token with a logprob; -1: none."
    )
    top_logprobs_num: int = Field(0, ge=0, description="Likeliest tokens to list.")
    token_ids_logprob: list[int] | None = Field(
        None, description="Token ids to list at every position."
    )
    return_text_in_logprobs: bool = Field(False, description="Tokens also as text.")


class ForkRequest(_Strict):
    """Continue one prompt in several ways at once. Exactly one of the first four."""

    text: str | None = Field(None, description="The prompt as text.")
    input_ids: list[int] | None = Field(None, description="The prompt as token ids.")
    messages: list[dict[str, Any]] | None = Field(
        None,
        description="The prompt as chat messages; the model's chat template makes the "
        "start of an answer of them.",
    )
    rid: str | None = Field(
        None,
        description="The id of a request that runs, or of a finished one with a group: "
        "the prompt is all that it has read and written so far.",
    )
    branches: list[Continuation] = Field(
        description="The ways to go on. One without text and ids samples the prompt.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_WIDTH},
    )
    sampling_params: dict[str, Any] = Field(
        default_factory=dict, description=f"Defaults for all branches. {_PARAMS}"
    )
    join: Continuation | None = Field(
        None,
        description="When all branches have ended: go on from the prompt, followed by "
        "every finished branch (what it added and wrote) in order, and this.",
    )
    first_k: int | None = Field(
        None,
        description="When so many branches have finished, cancel the others.",
        json_schema_extra={"minimum": 1, "maximum": MAX_WIDTH},
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    group: str | None = Field(
        None,
        description="The id of this request, for /abort_request; else the server names "
        "it. Not with rid: the branches then belong to the group of that request.",
        json_schema_extra={"pattern": f"^{GROUP_PATTERN.pattern}$"},
    )
    ttft_slo_ms: float | None = Field(None, json_schema_extra=_SLO)
    tpot_slo_ms: float | None = Field(None, json_schema_extra=_SLO)
    priority: float | None = Field(
        None,
        description="Weight for the `priority` utility.",
        json_schema_extra={"exclusiveMinimum": 0},
    )


class ForkEvent(BaseModel):
    """What a branch, or the join, has written. The last one has a finish reason."""

    branch: int | None = Field(description="Index of the branch; null for the join.")
    rid: str
    text: str = Field(description="So far, or since the last event, as on /generate.")
    finish_reason: dict[str, Any] | None = Field(
        description="SGLang's: `type` is stop, length or abort; null while it runs."
    )
    logprobs: dict[str, Any] | None = Field(
        None, description="If asked for: the *logprobs* of SGLang's meta_info."
    )
    output_ids: list[int] | None = Field(None, description="In the last event.")
    meta_info: dict[str, Any] | None = Field(
        None, description="In the last event: SGLang's, without logprobs."
    )


class ForkReport(BaseModel):
    """What was done for the whole request."""

    group: str
    width: int
    num_finished: int = Field(description="Branches that came to their own end.")
    branches: list[dict[str, Any] | None] = Field(
        description="`meta_info['taper']` of each; null for one that never ran."
    )
    join: dict[str, Any] | None = Field(None, description="The same of the join.")


class ForkSummary(BaseModel):
    """The last event before [DONE]."""

    usage: UsageInfo = Field(
        description="A prompt token that several branches share counts once."
    )
    taper: ForkReport


class ForkAnswer(ForkSummary):
    """The answer without streaming: the last event of each branch, in order."""

    branches: list[ForkEvent]
    join: ForkEvent | None = None


class ErrorMessage(BaseModel):
    """Names the field, its value and what is accepted."""

    message: str


class ForkError(BaseModel):
    """A call that was refused; nothing has been started."""

    error: ErrorMessage
