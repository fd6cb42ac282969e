"""The token ids of what the branches of a request have said.

A program sends text. Where that text was generated, tokenising it again may give other
ids than the model produced, and what follows is found in no radix tree. So the
tokenizer process remembers the ids, and a child whose text begins with a remembered
text gets them back (docs/adr/0009).

Plain data and pure functions: the time is passed in, and `decode` is the tokenizer's,
special tokens included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

Decode = Callable[[list[int]], str]

MAX_GROUPS = 4096
MAX_BRANCHES = 256
MAX_TOKENS = 1 << 22
# Longer than one branch usually takes: it is what lies between two uses of a group.
TTL_MS = 600_000.0
# Ids that a decoder needs to the left of a place to decode what is right of it as it
# would in the whole text. SGLang's detokenizer begins five ids before the first output.
NUM_CONTEXT_IDS = 8


class FinishedBranch(NamedTuple):
    """What a branch was asked and what it said.

    `prompt` is None where the client sent token ids. `prompt_ids` and `output_ids` are
    `array('q')` or lists. `output_ids` may end with ids that are not in `answer`: an
    end-of-sequence token, a stop string. `meta` is its metadata as sent, `end` SGLang's
    finish reason.
    """

    rid: str
    prompt: str | None
    answer: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    meta: Mapping[str, Any] = MappingProxyType({})
    end: Mapping[str, Any] = MappingProxyType({})

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


def longest_match(
    branches: Iterable[FinishedBranch], text: str, parent: str | None
) -> FinishedBranch | None:
    """The branch with the longest prompt plus answer that `text` begins with.

    Between equals the one named `parent`, else the newest (the last) wins.
    """
    best, best_rank = None, (0, False)
    for branch in branches:
        if branch.prompt is None or not branch.answer:
            continue
        rank = len(branch.prompt) + len(branch.answer), branch.rid == parent
        if rank >= best_rank and _begins_with(text, branch.prompt, branch.answer):
            best, best_rank = branch, rank
    return best


def _begins_with(text: str, prompt: str, answer: str) -> bool:
    return text.startswith(prompt) and text.startswith(answer, len(prompt))


def written_ids(
    context: Sequence[int], output_ids: Sequence[int], text: str, decode: Decode
) -> tuple[int, int]:
    """How many of `output_ids` are in `text`, and how many characters they are.

    The longest run from the start of `output_ids` whose text `text` begins with, so
    ids of a trimmed stop string or end of sequence are left out unless `text` goes on
    with them. `context` are the ids before, `text` is what follows these.
    """
    before = len(decode([*context]))

    def text_of(count: int) -> str:
        return decode([*context, *output_ids[:count]])[before:]

    def goes_beyond(count: int) -> bool:
        # An unfinished character decodes to U+FFFD and may yet be the right one.
        return not text.startswith(text_of(count).rstrip("\ufffd"))

    most = len(output_ids)
    if goes_beyond(most):
        most = bisect_left(range(most), True, key=goes_beyond) - 1
    for count in range(most, 0, -1):
        if text.startswith(written := text_of(count)):
            return count, len(written)
    return 0, 0


def seam_is_safe(
    ids: Sequence[int], suffix_ids: Sequence[int], suffix: str, decode: Decode
) -> bool:
    """Whether `suffix_ids`, encoded alone, still mean `suffix` when they follow `ids`.

    Not so for tokenizers that put a space before whatever they encode.
    """
    tail = [*ids[-NUM_CONTEXT_IDS:]]
    return decode([*tail, *suffix_ids]) == decode(tail) + suffix


def continued_ids(
    branch: FinishedBranch,
    text: str,
    decode: Decode,
    encode: Callable[[str], Sequence[int]],
) -> list[int] | None:
    """Ids of `text`, which begins with what `branch` was asked and said.

    Those of the branch, then the rest encoded without special tokens. None where
    that would not be the same text, or where nothing the branch generated is kept.
    """
    said = text[len(branch.prompt or "") :]
    context = branch.prompt_ids[-NUM_CONTEXT_IDS:]
    count, num_chars = written_ids(context, branch.output_ids, said, decode)
    if count == 0:
        return None
    ids = [*branch.prompt_ids, *branch.output_ids[:count]]
    suffix = said[num_chars:]
    suffix_ids = encode(suffix) if suffix else ()
    if not seam_is_safe(ids, suffix_ids, suffix, decode):
        return None
    return [*ids, *suffix_ids]


class _Group:
    def __init__(self) -> None:
        self.used_ms = 0.0
        self.branches: dict[str, FinishedBranch] = {}


class TokenMemory:
    """Finished branches by group; both forget what was not used for longest."""

    def __init__(
        self,
        max_groups: int = MAX_GROUPS,
        max_branches: int = MAX_BRANCHES,
        max_tokens: int = MAX_TOKENS,
        ttl_ms: float = TTL_MS,
    ) -> None:
        """Hold at most `max_groups` groups of `max_branches` each and `max_tokens` ids
        altogether, a group for at most `ttl_ms` after its last use."""
        self.max_groups, self.max_branches = max_groups, max_branches
        self.max_tokens, self.ttl_ms = max_tokens, ttl_ms
        self.num_tokens = 0
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._group_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def remember(self, group: str, branch: FinishedBranch, now_ms: float) -> None:
        """Keep `branch`, unless it alone is more than there is room for."""
        self._forget_unused(now_ms)
        if branch.num_tokens > self.max_tokens:
            return
        known = self._groups.setdefault(group, _Group())
        self._use(group, now_ms)
        self._drop(known, branch.rid)
        known.branches[branch.rid] = branch
        self._group_of[branch.rid] = group
        self.num_tokens += branch.num_tokens
        if len(known.branches) > self.max_branches:
            self._drop(known, next(iter(known.branches)))
        self._make_room()

    def recall(
        self, group: str, text: str, parent: str | None, now_ms: float
    ) -> FinishedBranch | None:
        """The branch whose ids `text` should begin with, as `longest_match`."""
        self._forget_unused(now_ms)
        known = self._groups.get(group)
        if known is None:
            return None
        found = longest_match(known.branches.values(), text, parent)
        if found is not None:
            self._use(group, now_ms)
            known.branches[found.rid] = known.branches.pop(found.rid)
        return found

    def find(self, rid: str, now_ms: float) -> FinishedBranch | None:
        """The branch of this request id, if it is still known."""
        self._forget_unused(now_ms)
        group = self._group_of.get(rid)
        if group is None:
            return None
        self._use(group, now_ms)
        return self._groups[group].branches[rid]

    def _use(self, group: str, now_ms: float) -> None:
        self._groups[group].used_ms = now_ms
        self._groups.move_to_end(group)

    def _drop(self, known: _Group, rid: str) -> None:
        dropped = known.branches.pop(rid, None)
        if dropped is not None:
            self._group_of.pop(rid, None)
            self.num_tokens -= dropped.num_tokens

    def _forget_unused(self, now_ms: float) -> None:
        while self._groups:
            if now_ms - next(iter(self._groups.values())).used_ms <= self.ttl_ms:
                return
            self._forget_oldest_group()

    def _forget_oldest_group(self) -> None:
        _, oldest = self._groups.popitem(last=False)
        for rid in [*oldest.branches]:
            self._drop(oldest, rid)

    def _make_room(self) -> None:
        while len(self._groups) > self.max_groups:
            self._forget_oldest_group()
        while self.num_tokens > self.max_tokens:
            oldest = next(iter(self._groups.values()))
            self._drop(oldest, next(iter(oldest.branches)))
            if not oldest.branches:
                self._groups.popitem(last=False)


def coder(tokenizer: Any) -> tuple[Decode, Callable[[str], list[int]]]:
    """(decode, encode) of a tokenizer as used here: nothing hidden, nothing added."""

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return decode, encode
