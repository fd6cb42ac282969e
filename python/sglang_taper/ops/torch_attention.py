"""Attention with log-sum-exp over dense keys, and the merge of partial results.

The two primitives of the CPU implementation. PyTorch's CPU flash kernel is a private
operator (a test pins what we rely on); where it is absent, or cannot do what is asked,
a plain matmul in float32 stands in.
"""

from __future__ import annotations

import torch
from torch import Tensor

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    soft_cap: float = 0.0,
    bias: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of q `[N, H, M, D]` over k `[N, H, L, D]`, v `[N, H, L, Dv]`, L >= 1.

    `bias`, added to the scores, broadcasts to `[N, H, M, L]` and has q's dtype;
    `causal` (M = L, no bias) lets query j see the first j + 1 keys. Strides are free.
    Returns out `[N, H, M, Dv]` in q's dtype and natural log-sum-exp `[N, H, M]` in
    float32.
    """
    if _flash is not None and not soft_cap and v.shape[-1] == q.shape[-1]:
        if bias is not None:
            bias = bias.expand(q.shape[0], -1, q.shape[2], -1)
        out, lse = _flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse
    return _attend_by_matmul(q, k, v, scale, soft_cap, bias, causal)


def _attend_by_matmul(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    soft_cap: float,
    bias: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if soft_cap:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if bias is not None:
        scores += bias
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(future, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse[..., None]).exp_()
    return torch.matmul(weights, v.float()).to(q.dtype), lse


def merge_states(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge L partial results over different keys into the result over all of them.

    out `[L, ..., Dv]` and lse `[L, ...]` in float32, natural logarithm. A part without
    keys has lse minus infinity and a finite out; without any keys the result is 0 and
    minus infinity. Returns `[..., Dv]` and `[...]`.
    """
    if len(lse) == 1:
        return out[0], lse[0]
    total = lse.logsumexp(0)
    weights = torch.exp(lse - total).nan_to_num_(0.0)
    return (out * weights[..., None]).sum(0), total
