"""What a branch shares with its group, what was computed again, what was lost."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sglang_taper.engine.groups import Branch, Group

# Branches of a group whose tokens are kept to tell what a new one could share.
NUM_SEEN_BRANCHES = 4


class Seen(NamedTuple):
    """Token ids of a branch, how many of them it has put into the tree, and where
    there: requests of another namespace share nothing with it."""

    tokens: Any
    num_published: int
    namespace: Hashable


def note_prefill(
    branch: Branch,
    prompt: Any,
    num_cached: int,
    page_size: int,
    namespace: Hashable = None,
) -> None:
    """Count what the branch shares and what of it was computed again.

    `prompt` is an `array('q')` of token ids, `num_cached` how many of them were found
    in the tree (or copied from a page of a sibling). Shared: what this request has
    already computed and the branch starts with (its longest common prefix with the
    newest branches of its group). Evicted: what of it was in the tree once.
    """
    if branch.prefilled:
        return
    branch.prefilled = True
    if (group := branch.group) is None:
        return
    branch.num_prefilled = 0 if branch.is_aliased else len(prompt) - num_cached
    known = [
        (common_prefix(prompt, seen.tokens), seen.num_published)
        for seen in group.seen
        if seen.namespace == namespace
    ]
    num_known = max((common for common, _ in known), default=0)
    branch.num_shared = min(num_cached, num_known)
    branch.num_recomputed = (
        0 if branch.is_aliased else max(0, num_known - branch.num_shared)
    )
    # The last token is always run, and a match ends at a page.
    num_found = max((min(pair) for pair in known), default=0)
    num_found = min(num_found, len(prompt) - 1) // page_size * page_size
    branch.num_evicted = max(0, num_found - num_cached)
    _remember(group, Seen(prompt, len(prompt) // page_size * page_size, namespace))


def note_finish(
    branch: Branch,
    prompt: Any,
    output: Any,
    page_size: int,
    namespace: Hashable = None,
) -> None:
    """Later stages may start with what this branch has generated."""
    if branch.group is not None and len(output):
        # The KV of the last token was not computed.
        num_published = (len(prompt) + len(output) - 1) // page_size * page_size
        _remember(branch.group, Seen(prompt + output, num_published, namespace))


def _remember(group: Group, seen: Seen) -> None:
    group.seen = [*group.seen[1 - NUM_SEEN_BRANCHES :], seen]


def common_prefix(left: Any, right: Any) -> int:
    """Length of the longest common prefix of two `array('q')`."""
    length = min(len(left), len(right))
    if not length:
        return 0
    one = np.frombuffer(left, dtype=np.int64, count=length)
    two = np.frombuffer(right, dtype=np.int64, count=length)
    different = np.flatnonzero(one != two)
    return int(different[0]) if different.size else length


def num_distinct(prompts: Iterable[Any]) -> int:
    """Tokens of these prompts (each an `array('q')`), where what several of them begin
    with counts once: the tokens of their tree."""
    ordered = sorted(prompts)
    repeated = sum(common_prefix(left, right) for left, right in pairwise(ordered))
    return sum(map(len, ordered)) - repeated
