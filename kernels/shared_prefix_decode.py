"""Decode attention over a tree of shared prefixes: one launch, then one merge.

A *part* is a stretch of tokens whose KV several rows read (a prefix) or one row reads
(its private tokens). The kernel does not tell them apart: it works through *tiles*,
each some packed queries of a part against some of its keys, and leaves one partial
output and log-sum-exp per (row, piece of its context). The merge combines each row's
partials. Levels of the tree are therefore only more tiles, never more launches.

Queries are packed (row of the part, query head of the KV head) along the M axis, so KV
is read once per tile whatever the head ratio. Rows are named through an index list:
queries are never permuted. Everything inside is base 2; what leaves is natural log.

`ops/work_list.py` makes the tiles and says what their fields mean.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend_tile(
    q,
    k_pool,
    v_pool,
    partial_out,
    partial_lse,
    req_to_token,
    req_pool_indices,
    tile,
    entry_row,
    entry_slot,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    request_stride,
    inner_scale,
    outer_scale,
    head,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    entry = tl.load(tile)
    num_rows = tl.load(tile + 1)
    packed = tl.load(tile + 2) * BLOCK_M + tl.arange(0, BLOCK_M)
    key_begin = tl.load(tile + 3)
    key_end = tl.load(tile + 4)
    split = tl.load(tile + 5)

    # All rows of a part read the same slots, so its first row names them.
    leader = tl.load(req_pool_indices + tl.load(entry_row + entry)).to(tl.int64)
    slots = req_to_token + leader * request_stride

    in_part = packed // GROUP
    is_row = in_part < num_rows
    row = tl.load(entry_row + entry + in_part, mask=is_row, other=0).to(tl.int64)
    q_head = head * GROUP + packed % GROUP
    dim = tl.arange(0, BLOCK_D)
    v_dim = tl.arange(0, BLOCK_DV)
    queries = tl.load(
        q
        + row[:, None] * q_row_stride
        + q_head[:, None] * q_head_stride
        + dim[None, :],
        mask=is_row[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first in tl.range(key_begin, key_end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        is_key = position < key_end
        slot = tl.load(slots + position, mask=is_key, other=0).to(tl.int64)
        k_mask = is_key[None, :]
        v_mask = is_key[:, None]
        if BLOCK_D != HEAD_DIM:
            k_mask = k_mask & (dim < HEAD_DIM)[:, None]
        if BLOCK_DV != V_HEAD_DIM:
            v_mask = v_mask & (v_dim < V_HEAD_DIM)[None, :]
        k_at = slot[None, :] * k_slot_stride + head * k_head_stride + dim[:, None]
        keys = tl.load(k_pool + k_at, mask=k_mask, other=0.0)
        logits = tl.dot(queries, keys, input_precision="ieee") * inner_scale
        if HAS_SOFT_CAP:  # tanh; its limits come out right when exp2 overflows
            logits = (1 - 2 / (tl.exp2(logits) + 1)) * outer_scale
        logits = tl.where(is_key[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # -inf minus -inf: logits that are all -inf must weigh nothing, not NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        kept = tl.exp2(top - base)
        weights = tl.exp2(logits - base[:, None])
        v_at = slot[:, None] * v_slot_stride + head * v_head_stride + v_dim[None, :]
        values = tl.load(v_pool + v_at, mask=v_mask, other=0.0)
        acc = acc * kept[:, None]
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        top = new_top

    partial = tl.load(entry_slot + entry + in_part, mask=is_row, other=0) + split
    state = partial.to(tl.int64) * NUM_Q_HEADS + q_head
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        partial_out + state[:, None] * V_HEAD_DIM + v_dim[None, :],
        (acc / divisor[:, None]).to(partial_out.dtype.element_ty),
        mask=is_row[:, None] & (v_dim < V_HEAD_DIM)[None, :],
    )
    lse = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
    tl.store(partial_lse + state, lse, mask=is_row)


@triton.jit
def attend_tiles(
    q,
    k_pool,
    v_pool,
    partial_out,
    partial_lse,
    req_to_token,
    req_pool_indices,
    num_tiles,
    tiles,
    entry_row,
    entry_slot,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    request_stride,
    inner_scale,
    outer_scale,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SMALL_M: tl.constexpr,
    LARGE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Partial attention of every tile; writes `partial_out`, `partial_lse` (base 2).

    A fixed number of programs strides over (tile, KV head); how many tiles there are
    is read from the device, so a captured launch serves any work list. Programs beyond
    the work do nothing. KV heads of a tile are neighbours: the programs that run
    together read whole tokens.
    """
    num_items = tl.load(num_tiles) * NUM_KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        head = item % NUM_KV_HEADS
        tile = tiles + (item // NUM_KV_HEADS) * TILE_FIELDS
        for is_large in tl.static_range(2):  # the two tile sizes, one after the other
            if tl.load(tile + 6) == is_large:
                _attend_tile(
                    q,
                    k_pool,
                    v_pool,
                    partial_out,
                    partial_lse,
                    req_to_token,
                    req_pool_indices,
                    tile,
                    entry_row,
                    entry_slot,
                    q_row_stride,
                    q_head_stride,
                    k_slot_stride,
                    k_head_stride,
                    v_slot_stride,
                    v_head_stride,
                    request_stride,
                    inner_scale,
                    outer_scale,
                    head,
                    NUM_Q_HEADS,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    V_HEAD_DIM,
                    BLOCK_D,
                    BLOCK_DV,
                    LARGE_M if is_large == 1 else SMALL_M,
                    BLOCK_N,
                    HAS_SOFT_CAP,
                )


@triton.jit
def merge_partials(
    partial_out,
    partial_lse,
    out,
    lse,
    row_start,
    out_row_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Combine the partials [row_start[row], row_start[row + 1]) of each row.

    Grid (rows, head blocks). A row without partials gets output 0 and lse -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < NUM_Q_HEADS
    dim = tl.arange(0, BLOCK_DV)
    mask = is_head[:, None] & (dim < V_HEAD_DIM)[None, :]
    begin = tl.load(row_start + row).to(tl.int64)
    end = tl.load(row_start + row + 1).to(tl.int64)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for partial in tl.range(begin, end):
        state = partial * NUM_Q_HEADS + head
        part_lse = tl.load(partial_lse + state, mask=is_head, other=float("-inf"))
        at = partial_out + state[:, None] * V_HEAD_DIM + dim[None, :]
        part = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, part_lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        kept = tl.exp2(top - base)
        weight = tl.exp2(part_lse - base)
        acc = acc * kept[:, None] + part * weight[:, None]
        total = total * kept + weight
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    at = out + row * out_row_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(at, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=mask)
    row_lse = tl.where(total > 0, (top + tl.log2(divisor)) * LN_2, float("-inf"))
    tl.store(lse + row * NUM_Q_HEADS + head, row_lse, mask=is_head)
