"""Metadata of the branches a client opens: who belongs together, who is whose child."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sglang_taper.ids import new_group
from sglang_taper.protocol import (
    CUSTOM_PARAMS_KEY,
    ROUTING_KEY_HEADER,
    BranchMeta,
    fork_meta,
    with_metadata,
)

Prompt = str | Sequence[int]

# Below this, prefilling the prefix in every sibling costs less than the round trip
# of committing it first; sglang.lang uses the same bound before run_batch.
COMMIT_MIN_CHARS = 64


def with_branch(
    sampling_params: Mapping[str, Any] | None, meta: BranchMeta
) -> dict[str, Any]:
    """A copy of `sampling_params` that carries `meta`, as `with_metadata`."""
    return with_metadata(sampling_params, meta.to_wire())


def routing_headers(body: Mapping[str, Any] | None) -> dict[str, str]:
    """The header by which a router in front of several replicas keeps a group on one.

    `body` is what is sent: a branch, or something about a `group`. {} without one.
    """
    body = body or {}
    custom = (body.get("sampling_params") or {}).get("custom_params") or {}
    group = body.get("group") or (custom.get(CUSTOM_PARAMS_KEY) or {}).get("group")
    return {ROUTING_KEY_HEADER: group} if group else {}


def joined(prompt: Prompt, suffix: Prompt) -> Prompt:
    """A branch's whole prompt. Raises TypeError when one is text and one token ids."""
    if isinstance(prompt, str) and isinstance(suffix, str):
        return prompt + suffix
    if isinstance(prompt, str) or isinstance(suffix, str):
        raise TypeError("prompt and suffixes must both be text or both be token ids")
    return [*prompt, *suffix]


class Branch:
    """One program state: its metadata, and what the server has already seen of it.

    The root of a program is branch 0 of width 1 at depth 0. Its stage is the number
    of forks so far; a child keeps the stage of the fork that made it. Forks are
    numbered over the whole program, so group, depth, stage and branch name a state.
    """

    def __init__(self, meta: BranchMeta, stages: Iterator[int]) -> None:
        self.meta = meta
        self.last_rid: str | None = None
        self.num_cached_chars = 0
        self.num_cached_images = 0
        self._stages = stages

    @classmethod
    def root(cls, targets: BranchMeta) -> Branch:
        """The first state of a new request; `targets` holds its SLOs and priority."""
        return cls(replace(targets, group=new_group()), itertools.count(1))

    def fork(self, width: int) -> list[Branch]:
        """The children of a fork into `width` branches; opens a new stage.

        Raises FieldError as `fork_meta` does.
        """
        stage = next(self._stages)
        metas = fork_meta(self.meta, width, stage, self.last_rid)
        if self.meta.depth == 0:
            self.meta = replace(self.meta, stage=stage)
        return [self._child(meta) for meta in metas]

    def _child(self, meta: BranchMeta) -> Branch:
        child = Branch(meta, self._stages)
        child.num_cached_chars = self.num_cached_chars
        child.num_cached_images = self.num_cached_images
        return child

    def cached(self, num_chars: int, num_images: int) -> None:
        """Note that the server's radix tree holds this much of the state."""
        self.num_cached_chars = num_chars
        self.num_cached_images = num_images

    def worth_committing(self, num_chars: int, num_images: int) -> bool:
        """Whether siblings gain when this much is committed before they arrive."""
        return (
            num_images > self.num_cached_images
            or num_chars - self.num_cached_chars > COMMIT_MIN_CHARS
        )
