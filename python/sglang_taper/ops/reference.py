"""What attention over a paged KV pool is, in float64, row by row: the truth of tests.

No sharing, no speed. `soft_cap` c > 0 replaces a score s by `c * tanh(s / c)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Sequence[Tensor],
    scale: float,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row over all slots of the row.

    q `[B, Hq, D]`, pools `[S, Hkv, D]` and `[S, Hkv, Dv]`, `slots[b]` the KV slots of
    row b in order. Returns out `[B, Hq, Dv]` and natural log-sum-exp `[B, Hq]`, both
    float64; a row without slots has output 0 and minus infinity.
    """
    lens = [len(row) for row in slots]
    before = [max(n - 1, 0) for n in lens]
    return reference_extend(
        q, k_pool, v_pool, slots, before, [1] * len(lens), scale, soft_cap
    )


def reference_extend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Sequence[Tensor],
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    scale: float,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last `extend_lens[b]` tokens of each row.

    q `[sum(extend_lens), Hq, D]`; query j of row b sees the first
    `prefix_lens[b] + j + 1` slots. Returns as `reference_decode`, one row per query.
    """
    outs, lses = [], []
    for queries, row, prefix in zip(
        q.double().split(list(extend_lens)), slots, prefix_lens, strict=True
    ):
        keys, values = k_pool[row.long()].double(), v_pool[row.long()].double()
        out, lse = _row(queries, keys, values, prefix, scale, soft_cap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _row(
    q: Tensor, k: Tensor, v: Tensor, prefix: int, scale: float, soft_cap: float
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = torch.arange(len(k)) <= prefix + torch.arange(len(q))[:, None]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", weights, v), lse
