"""Plan of a decode step on the CPU: which keys are read together, once per step.

The KV slots of every row are dealt out to *parts*, each slot of a row to exactly one:
shared parts (many rows over one list of keys) and private parts (rows with a list of
keys each, padded to the longest). Long runs of consecutive slots are sliced from the
pool, everything else is gathered. Segments too small to be worth a call of their own
are read with the private keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglang_taper.ops.segments import StepLayout, check_layout, private_starts

# What a further call of the attention kernel costs, in keys read by one row (SmolLM2
# shape: about 40 us against 0.08 us a key). Padding and repeated reads up to it pay.
CALL_TOKENS = 512
# Gathered at once for private parts: more falls out of the caches before it is used.
MAX_CALL_KEYS = 8192
# Keys are cut so that every thread has work, but never into pieces smaller than this.
MIN_SPLIT_TOKENS = 512
MAX_SPLITS = 8

Slots = np.ndarray


class Part(msgspec.Struct, frozen=True):
    """One call of the attention kernel.

    `keys` names the pool's slots, a slice or int64 indices. Shared (`bias` None): every
    row reads all keys, cut into `num_splits` equal pieces with a result each. Private:
    row r reads the r-th of `len(rows)` equal pieces, padding masked by `bias`
    `[len(rows), 1, 1, longest]`. `positions` is where the results go: state x num_rows
    + row, for each split and row.
    """

    rows: Tensor
    keys: slice | Tensor
    positions: Tensor
    num_splits: int = 1
    bias: Tensor | None = None


class TorchPlan(msgspec.Struct):
    """The parts of a step; each row has up to `num_states` partial results.

    `workspace` holds them between the parts and the merge, one for each shape of
    output, so a plan serves one layer at a time.
    """

    num_rows: int
    num_states: int
    parts: tuple[Part, ...]
    workspace: dict[tuple[int, int], tuple[Tensor, Tensor]]

    @property
    def num_saved_tokens(self) -> int:
        """Tokens of rows that are read for another row anyway."""
        shared = (part for part in self.parts if part.bias is None)
        return sum((len(part.rows) - 1) * num_keys(part.keys) for part in shared)


def num_keys(keys: slice | Tensor) -> int:
    return keys.stop - keys.start if isinstance(keys, slice) else len(keys)


def make_plan(
    layout: StepLayout,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    dtype: torch.dtype = torch.float32,
) -> TorchPlan:
    """Plan for one step: used by every layer, valid while slots and lengths are.

    `req_to_token[R, C]` int32 holds the slots of request row R; row b of the step is
    row `req_pool_indices[b]` of it. `dtype` is that of the queries. Raises FieldError
    for a layout that does not hold together.
    """
    check_layout(layout)
    table = req_to_token.numpy()
    lines = [table[index] for index in req_pool_indices.tolist()]
    planner = _Planner(len(lines), dtype)
    rest = _plan_segments(planner, layout, lines)
    for row, start in enumerate(private_starts(layout)):
        rest[row].append(lines[row][start : layout.seq_lens[row]])
    _plan_private(planner, [np.concatenate(row) for row in rest])
    return TorchPlan(len(lines), max(planner.states, default=0), planner.parts(), {})


class _Planner:
    """Parts so far, and how many results each row has."""

    def __init__(self, num_rows: int, dtype: torch.dtype) -> None:
        self.states = [0] * num_rows
        self._dtype = dtype
        self._parts: list[Part] = []

    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts)

    def share(self, rows: Sequence[int], keys: slice | Tensor, splits: int) -> None:
        positions = [self._next_state(row) for _ in range(splits) for row in rows]
        self._parts.append(
            Part(torch.tensor(rows), keys, torch.tensor(positions), splits)
        )

    def private(self, rows: Sequence[int], slots: Sequence[Slots]) -> None:
        longest = max(map(len, slots))
        # slot 0 stands in for the padding: readable and masked
        keys = np.zeros((len(rows), longest), np.int64)
        bias = torch.zeros(len(rows), 1, 1, longest, dtype=self._dtype)
        for index, own in enumerate(slots):
            keys[index, : len(own)] = own
            bias[index, ..., len(own) :] = -torch.inf
        self._parts.append(
            Part(
                rows=torch.tensor(rows),
                keys=torch.from_numpy(keys.reshape(-1)),
                positions=torch.tensor([self._next_state(row) for row in rows]),
                bias=bias,
            )
        )

    def _next_state(self, row: int) -> int:
        self.states[row] += 1
        return (self.states[row] - 1) * len(self.states) + row


def _plan_segments(
    planner: _Planner, layout: StepLayout, lines: Sequence[Slots]
) -> list[list[Slots]]:
    """Plan what is worth sharing; returns the slots left to each row."""
    left: list[list[Slots]] = [[] for _ in lines]
    for segment in layout.segments:
        rest = lines[segment.rows[0]][segment.start : segment.end]
        if (len(segment.rows) - 1) * len(rest) >= CALL_TOKENS:
            rest = _share(planner, segment.rows, rest)
        for row in segment.rows:
            left[row].append(rest)
    return left


def _share(planner: _Planner, rows: Sequence[int], slots: Slots) -> Slots:
    """One part for each long run and one for what is between; returns the remainder."""
    runs, scattered = _consecutive(slots)
    if len(runs) == 0 and _is_run(slots):
        runs, scattered = [(int(slots[0]), len(slots))], slots[:0]
    rest = _slice_runs(planner, rows, runs)
    if (len(rows) - 1) * len(scattered) >= CALL_TOKENS:
        splits = _num_splits(len(scattered))
        even = len(scattered) - len(scattered) % splits
        indices = torch.from_numpy(scattered[:even].astype(np.int64))
        planner.share(rows, indices, splits)
        scattered = scattered[even:]
    return np.concatenate([*rest, scattered])


def _plan_private(planner: _Planner, slots: Sequence[Slots]) -> None:
    left: dict[int, Slots] = {}
    for row, own in enumerate(slots):
        runs, scattered = _consecutive(own)
        rest = np.concatenate([*_slice_runs(planner, [row], runs), scattered])
        if len(rest):
            left[row] = rest
    for rows in buckets({row: len(own) for row, own in left.items()}):
        planner.private(rows, [left[row] for row in rows])


def buckets(lengths: dict[int, int]) -> list[list[int]]:
    """Rows to pad together, longest first: no bucket pads more than a call costs, and
    none but that of a single row has more than `MAX_CALL_KEYS` keys."""
    chosen: list[list[int]] = []
    longest = waste = 0
    for row in sorted(lengths, key=lambda row: (-lengths[row], row)):
        waste += longest - lengths[row]
        is_full = chosen and (len(chosen[-1]) + 1) * longest > MAX_CALL_KEYS
        if not chosen or is_full or waste > CALL_TOKENS:
            chosen.append([])
            longest, waste = lengths[row], 0
        chosen[-1].append(row)
    return chosen


def _consecutive(slots: Slots) -> tuple[list[tuple[int, int]], Slots]:
    """Runs `(first slot, length)` worth a call of their own, and the other slots."""
    if len(slots) < CALL_TOKENS:
        return [], slots
    edges = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2, append=-2) != 1)
    long = np.flatnonzero(np.diff(edges) >= CALL_TOKENS)
    spans = [(int(edges[i]), int(edges[i + 1])) for i in long]
    others = np.ones(len(slots), bool)
    for begin, end in spans:
        others[begin:end] = False
    return [(int(slots[begin]), end - begin) for begin, end in spans], slots[others]


def _is_run(slots: Slots) -> bool:
    return bool(slots[-1] - slots[0] == len(slots) - 1 and np.all(np.diff(slots) == 1))


def _slice_runs(
    planner: _Planner, rows: Sequence[int], runs: Sequence[tuple[int, int]]
) -> list[Slots]:
    """Plan the runs; returns the slots at their ends that do not split evenly."""
    rest = []
    for first, length in runs:
        splits = _num_splits(length)
        even = length - length % splits
        planner.share(rows, slice(first, first + even), splits)
        rest.append(np.arange(first + even, first + length))
    return rest


def _num_splits(num_keys: int) -> int:
    pieces = min(torch.get_num_threads(), MAX_SPLITS, num_keys // MIN_SPLIT_TOKENS)
    return max(pieces, 1)
