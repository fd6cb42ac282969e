"""A group goes to one data-parallel rank: the one that holds its prefix.

Each rank (`--dp-size`) has its own KV cache and plans its own steps. SGLang's
controller deals requests out one by one, unless a request names its rank. A grouped
request gets a rank from a hash of its group: tokenizer workers and later stages of a
program agree on it without telling each other, and nothing is remembered.
"""

from __future__ import annotations

import hashlib
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from sglang_taper.protocol import CUSTOM_PARAMS_KEY


def rank_of_group(group: str, num_ranks: int) -> int:
    """The data-parallel rank of `group`, in [0, `num_ranks`); the same everywhere.

    Groups spread evenly over the ranks; how busy a rank is plays no part.
    """
    digest = hashlib.blake2b(group.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % num_ranks


def keep_group_together_hook(
    tokenized: Any, manager: Any, *_args: Any, **_kwargs: Any
) -> None:
    """AFTER `TokenizerManager._create_tokenized_object`: sets `routed_dp_rank`.

    Not when the client named a rank, when the request stands alone, or when there
    is one rank only.
    """
    num_ranks = manager.elastic_worker_count
    if num_ranks < 2 or not isinstance(tokenized, TokenizedGenerateReqInput):
        return
    group = _group_of(tokenized.sampling_params)
    if group is not None and tokenized.routed_dp_rank is None:
        tokenized.routed_dp_rank = rank_of_group(group, num_ranks)


def _group_of(sampling_params: Any) -> str | None:
    custom = sampling_params.custom_params
    meta = custom.get(CUSTOM_PARAMS_KEY) if isinstance(custom, dict) else None
    return meta.get("group") if isinstance(meta, dict) else None
