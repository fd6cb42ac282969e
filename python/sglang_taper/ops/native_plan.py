"""Plan of a step for the C attention: which keys are read for which rows together.

An *item* is a run of slots of one request row and the query rows that see them: a
segment's, a row's private tokens, or new tokens of a prefill behind and among its own
keys. Large items are cut by rows and by keys, so that every thread has work; rows with
results of several items are merged. Slots are read from the request table itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_taper.ops.segments import StepLayout, check_layout, private_starts

# Rows of an item: their queries and results lie in a core's cache beside packed keys.
# In a prefill an item's keys are packed for it alone, so it has more of them.
MAX_ITEM_ROWS, MAX_NEW_ROWS = 64, 128
# Keys are cut into pieces no shorter, and at multiples of the granule.
MIN_PIECE_KEYS, PIECE_GRANULE = 128, 64
# Items per thread that a step is cut into, as far as it has to be: what is left at the
# end is a fraction of that.
PIECES_PER_THREAD = 4
# What packing a key costs, in rows that read it.
PACKING_ROWS = 1
# A step with less work, in keys times rows, runs on the calling thread.
MIN_THREAD_WORK = 512
SEES_ALL = 1 << 62

Ints = NDArray[np.int64]


class NativePlan(msgspec.Struct):
    """The work of a step, for any number of heads.

    `items` `[n, 6]`, `merges` `[m, 2]` and `partials` are as the C source says; `rows`
    lists the query rows of all items. Serves one layer at a time, and holds on to the
    request table that it reads.
    """

    num_queries: int
    table: Tensor
    items: Ints
    rows: NDArray[np.int32]
    merges: Ints
    partials: Ints
    num_partials: int
    num_threads: int
    num_saved_tokens: int
    workspace: dict[Any, Any]  # what `native_attention` prepares for a shape of heads


class Item(NamedTuple):
    """Keys `[slots, slots + keys)` of the flat request table, for query `rows`, of
    which the first sees `seen` keys and every further one more."""

    slots: int
    keys: int
    rows: Sequence[int]
    seen: int

    @property
    def work(self) -> int:
        return self.keys * (PACKING_ROWS + len(self.rows))


def make_plan(
    layout: StepLayout,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    dtype: torch.dtype = torch.float32,
) -> NativePlan:
    """Plan of a decode step: used by every layer, valid while slots and lengths are.

    Arguments as `torch_plan.make_plan`; `dtype` does not matter here. Raises FieldError
    for a layout that does not hold together.
    """
    check_layout(layout)
    line = req_to_token.stride(0)
    begins = [index * line for index in req_pool_indices.tolist()]
    items = [
        Item(begins[s.rows[0]] + s.start, s.end - s.start, rows, SEES_ALL)
        for s in layout.segments
        for rows in _batched(s.rows, MAX_ITEM_ROWS)
    ]
    starts = private_starts(layout)
    for row, (start, length) in enumerate(zip(starts, layout.seq_lens, strict=True)):
        items.append(Item(begins[row] + start, length - start, (row,), SEES_ALL))
    saved = sum((len(s.rows) - 1) * (s.end - s.start) for s in layout.segments)
    return _plan(items, len(begins), req_to_token, saved)


def make_extend_plan(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
) -> NativePlan:
    """Plan of a prefill step; arguments as `torch_extend.make_extend_plan`."""
    line, items, begin = req_to_token.stride(0), [], 0
    for index, prefix, num_new in zip(
        req_pool_indices.tolist(), prefix_lens, extend_lens, strict=True
    ):
        for first in range(0, num_new, MAX_NEW_ROWS):
            end = min(first + MAX_NEW_ROWS, num_new)
            rows = range(begin + first, begin + end)
            items.append(Item(index * line, prefix + end, rows, prefix + first + 1))
        begin += num_new
    return _plan(items, begin, req_to_token, 0)


def _plan(items: list[Item], num_queries: int, table: Tensor, saved: int) -> NativePlan:
    threads = torch.get_num_threads()
    total = sum(item.work for item in items)
    if total < MIN_THREAD_WORK:
        threads = 1
    limit = max(1, total if threads == 1 else total // (PIECES_PER_THREAD * threads))
    pieces = [piece for item in items for piece in _pieces(item, limit)]
    # long ones first, so that none ends late
    pieces.sort(key=lambda piece: -piece.work)
    widths = np.array([len(piece.rows) for piece in pieces], np.int64)
    rows = np.array([row for piece in pieces for row in piece.rows], np.int32)
    first_rows = np.cumsum(widths) - widths
    piece_of = np.repeat(np.arange(len(pieces)), widths)
    num_results = np.bincount(rows, minlength=num_queries)
    # a piece none of whose rows has a further result writes the final one
    is_final = np.bincount(piece_of, num_results[rows] - 1, len(pieces)) == 0
    partial = np.where(is_final, 0, widths)
    first_partials = np.cumsum(partial) - partial
    shown = [
        [piece.slots, piece.keys, 0, len(piece.rows), piece.seen, 0] for piece in pieces
    ]
    columns = np.array(shown, np.int64).reshape(-1, 6)
    columns[:, 2], columns[:, 5] = first_rows, np.where(is_final, -1, first_partials)
    return NativePlan(
        num_queries=num_queries,
        table=table,
        items=columns,
        rows=rows,
        **_merges(rows, ~is_final[piece_of], num_queries, num_results),
        num_partials=int(partial.sum()),
        num_threads=threads,
        num_saved_tokens=saved,
        workspace={},
    )


def _pieces(item: Item, limit: int) -> Iterator[Item]:
    """The item in runs of keys of about equal work, none above the limit if that can
    be."""
    if item.keys == 0:
        return
    count = max(1, min(-(-item.work // limit), item.keys // MIN_PIECE_KEYS))
    size = -(-item.keys // (count * PIECE_GRANULE)) * PIECE_GRANULE
    for key in range(0, item.keys, size):
        keys = min(size, item.keys - key)
        yield Item(item.slots + key, keys, item.rows, item.seen - key)


def _batched(rows: tuple[int, ...], largest: int) -> Iterator[tuple[int, ...]]:
    """Equal batches, as far as that goes."""
    size = -(-len(rows) // -(-len(rows) // largest))
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def _merges(
    rows: NDArray[np.int32],
    is_partial: NDArray[np.bool_],
    num_queries: int,
    count: Ints,
) -> dict[str, Ints]:
    """Each row with partial results, or without any result, and where they are."""
    of_row = rows[is_partial]
    num_partials = np.bincount(of_row, minlength=num_queries)
    merged = np.flatnonzero((num_partials > 0) | (count == 0))
    ends = np.cumsum(num_partials[merged])
    return {
        "merges": np.stack([merged, ends], 1).astype(np.int64),
        "partials": np.argsort(of_row, kind="stable").astype(np.int64),
    }
