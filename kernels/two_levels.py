"""What FlashInfer's two attention launches need around them.

`gather_slots` lists the KV slots of both levels before the layers run; `merge_levels`
combines the two partial outputs of a layer. The first level is in an order of its own,
groups one after the other, and knows nothing of rows without a group.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def gather_slots(
    req_to_token,
    req_pool_indices,
    row_of,
    first_token,
    first_slot,
    num_tokens,
    slots,
    request_stride,
    BLOCK: tl.constexpr,
):
    """slots[first_slot[i] + t] = slot of token first_token[i] + t of row row_of[i].

    Grid (entries, programs that share one entry).
    """
    entry = tl.program_id(0)
    request = tl.load(req_pool_indices + tl.load(row_of + entry)).to(tl.int64)
    source = req_to_token + request * request_stride + tl.load(first_token + entry)
    target = slots + tl.load(first_slot + entry)
    count = tl.load(num_tokens + entry)
    step = tl.num_programs(1) * BLOCK
    for first in range(tl.program_id(1) * BLOCK, count, step):
        token = first + tl.arange(0, BLOCK)
        is_token = token < count
        tl.store(target + token, tl.load(source + token, mask=is_token), mask=is_token)


@triton.jit
def merge_levels(
    shared_out,
    shared_lse,
    private_out,
    private_lse,
    shared_row,
    out,
    lse,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One output from a row's shared and private parts; any number of heads.

    `shared_row[row]` is where the row is in the first level, or -1. Both inputs have
    log-sum-exps in base 2, both results are in row order, and `lse` is natural. A part
    without keys has -inf (or +inf, as FlashAttention 2 writes it); a row with two such
    parts gets 0 and -inf. Grid (rows, head blocks).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < NUM_Q_HEADS
    dim = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    source = tl.load(shared_row + row).to(tl.int64)
    has_shared = source >= 0
    own = row * NUM_Q_HEADS + head
    other = tl.maximum(source, 0) * NUM_Q_HEADS + head
    infinity = float("inf")
    own_lse = tl.load(private_lse + own, mask=is_head, other=-infinity)
    other_lse = tl.load(shared_lse + other, mask=is_head & has_shared, other=-infinity)
    own_lse = tl.where(own_lse == infinity, -infinity, own_lse)
    other_lse = tl.where(other_lse == infinity, -infinity, other_lse)
    top = tl.maximum(own_lse, other_lse)
    base = tl.where(top == -infinity, 0.0, top)
    own_weight = tl.exp2(own_lse - base)
    other_weight = tl.exp2(other_lse - base)
    # what has no weight is not read: whatever lies there must not matter
    own_mask = mask & (own_weight > 0)[:, None]
    other_mask = mask & (other_weight > 0)[:, None]
    own_at = private_out + own[:, None] * HEAD_DIM + dim[None, :]
    other_at = shared_out + other[:, None] * HEAD_DIM + dim[None, :]
    mixed = tl.load(own_at, mask=own_mask, other=0.0).to(tl.float32)
    mixed = mixed * own_weight[:, None]
    shared = tl.load(other_at, mask=other_mask, other=0.0).to(tl.float32)
    mixed += shared * other_weight[:, None]
    total = own_weight + other_weight
    divisor = tl.where(total > 0, total, 1.0)
    at = out + own[:, None] * HEAD_DIM + dim[None, :]
    tl.store(at, (mixed / divisor[:, None]).to(out.dtype.element_ty), mask=mask)
    row_lse = tl.where(total > 0, (top + tl.log2(divisor)) * LN_2, -infinity)
    tl.store(lse + own, row_lse, mask=is_head)
