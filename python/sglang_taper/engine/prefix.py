"""The radix tree as forks use it: match, publish what a branch has computed, lock.

Only methods that both of SGLang's tree cores have are used, and nodes are opaque.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import _req_radix_key

from sglang_taper.engine.sharing import common_prefix
from sglang_taper.policy.forks import Prompt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


class PrefixTree:
    """One per scheduler, around its `tree_cache`."""

    def __init__(self, tree: BasePrefixCache) -> None:
        self.tree = tree

    @property
    def is_shared(self) -> bool:
        """Whether what one request puts into the tree is found by another.

        False without radix cache, in SGLang's forced-miss test mode, and for models
        whose state is more than KV (sliding window, Mamba): forks are then left to
        SGLang, which recomputes what it must.
        """
        tree = self.tree
        return (
            tree.supports_prefix_sharing()
            and not getattr(tree, "disable", False)
            and not tree.supports_mamba()
            and not tree.supports_swa()
            and not envs.SGLANG_RADIX_FORCE_MISS.get()
        )

    def match(self, req: Req) -> Prompt:
        """All tokens of `req` and how many of those it may share are there.

        Side effect: the matched path becomes the most recently used one.
        """
        tokens = tokens_of(req)
        limit = req._compute_max_prefix_len(len(tokens))
        return self._match(req, tokens, limit)

    def match_all(self, req: Req, tokens: Any) -> Prompt:
        """How many of `tokens`, in the namespace of `req`, are there."""
        return self._match(req, tokens, len(tokens))

    def _match(self, req: Req, tokens: Any, limit: int) -> Prompt:
        key = _req_radix_key(self.tree, req, tokens, limit)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        return Prompt(
            tokens,
            found.last_device_node,
            found.device_prefix_len,
            limit,
            namespace_of(req),
        )

    def publish(self, req: Req) -> None:
        """Put what the running `req` has computed into the tree.

        Legal wherever SGLang checkpoints a chunked prefill: at the scheduling point,
        also while a forward of `req` is in flight. The row of `req` then points at
        the tree's slots, and its lock moves to the deeper node.
        """
        req.refresh_fill_ids()
        self.tree.checkpoint(req, up_to=num_computed(req))

    def num_evictable_beside(self, node: Any) -> int:
        """Tokens that can be evicted while the path to `node` is kept."""
        lock = self.tree.lock(node)
        try:
            return int(self.tree.evictable_size())
        finally:
            self.tree.unlock(lock)


def tokens_of(req: Req) -> Any:
    """Prompt and output of `req` so far, a new `array('q')`."""
    return req.origin_input_ids + req.output_ids


def namespace_of(req: Req) -> Hashable:
    """Requests share KV only within one: SGLang's tree keeps them apart by it."""
    return (req.extra_key, req.cache_salt, req.lora_id)


def num_computed(req: Req) -> int:
    """Leading tokens of `req` that are known and whose KV is written or in flight."""
    num_known = len(req.origin_input_ids) + len(req.output_ids)
    return min(int(req.kv.kv_committed_len), num_known)


def is_publishable(req: Req) -> bool:
    """Whether `req` runs, holds KV and may put it into the tree."""
    return (
        req.kv.holds_kv
        and not req.finished()
        and not req.is_retracted
        and not req.skip_radix_cache_insert
        and req.session is None
        and req.beam_group is None
    )


def num_common(tokens: Any, req: Req) -> int:
    """Leading `tokens` that `req` has computed (see `num_computed`)."""
    return min(common_prefix(tokens, tokens_of(req)), num_computed(req))


def may_share_more(prompt: Prompt, req: Req) -> bool:
    """Cheap: does `req` go on where the match of `prompt` ends?"""
    position = prompt.num_matched
    if position >= min(prompt.limit, num_computed(req)):
        return False
    return bool(prompt.tokens[position] == _token_at(req, position))


def _token_at(req: Req, position: int) -> int:
    num_prompt = len(req.origin_input_ids)
    if position < num_prompt:
        return int(req.origin_input_ids[position])
    return int(req.output_ids[position - num_prompt])
