"""A plan becomes the rows that run: writes only.

The running batch keeps all its rows. A step that leaves some out runs a *view*: a
shallow copy filtered to the admitted rows, prepared by SGLang's own
`prepare_for_decode`. Afterwards the lengths of the admitted rows, and the state of
their penalties, are written back; nothing else of the running batch changes, so
memory checks, retraction, aborts and idle detection see every row (docs/adr/0001).
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

# Tensors of one entry per row that `prepare_for_decode` advances by one token.
_LENGTHS = ("seq_lens", "seq_lens_cpu", "orig_seq_lens")


def admit_rows(batch: ScheduleBatch, rows: list[int]) -> ScheduleBatch:
    """The batch that runs this step: `batch` itself, or a view of `rows` of it.

    `rows` is ascending and not empty. Side effects: SGLang's `prepare_for_decode`
    on what runs (allocates one KV slot per admitted row); on a view, lengths and
    penalty state of the admitted rows are written back to `batch`.
    """
    if len(rows) == batch.batch_size():
        batch.prepare_for_decode()
        return batch
    view = _make_view(batch, rows)
    view.prepare_for_decode()
    _write_back(batch, view, rows)
    return view


def _make_view(batch: ScheduleBatch, rows: list[int]) -> ScheduleBatch:
    view = copy.copy(batch)
    view.sampling_info = copy.copy(batch.sampling_info)
    view.sampling_info.penalizer_orchestrator = _copy_penalizers(
        batch.sampling_info.penalizer_orchestrator, view
    )
    view.filter_batch(keep_indices=rows)
    return view


def _copy_penalizers(orchestrator: Any, view: ScheduleBatch) -> Any:
    """Penalizers that may be filtered and advanced without touching the originals.

    Filtering rebinds their tensors, so copies of the objects are enough; only their
    back references must point at the copy.
    """
    if not orchestrator.is_required:
        return orchestrator
    twin = copy.copy(orchestrator)
    twin.batch = view
    twin.penalizers = {}
    for kind, penalizer in orchestrator.penalizers.items():
        twin.penalizers[kind] = copied = copy.copy(penalizer)
        copied._orchestrator_ref = weakref.ref(twin)
    return twin


def _write_back(batch: ScheduleBatch, view: ScheduleBatch, rows: list[int]) -> None:
    for name in _LENGTHS:
        lengths = getattr(batch, name)
        if lengths is not None:
            # New tensors: an overlapped forward may still read the old ones.
            advanced = lengths.clone()
            advanced[rows] += 1
            setattr(batch, name, advanced)
    _write_back_penalties(batch, view, rows)
    # What `prepare_for_decode` would have reset on the batch itself.
    batch.forward_mode = ForwardMode.DECODE
    batch.input_ids = batch.input_embeds = None
    batch.replace_embeds = batch.replace_positions = None
    batch.seq_lens_sum = None


def _write_back_penalties(
    batch: ScheduleBatch, view: ScheduleBatch, rows: list[int]
) -> None:
    originals = batch.sampling_info.penalizer_orchestrator
    advanced = view.sampling_info.penalizer_orchestrator
    if advanced is originals:
        return
    for kind, penalizer in originals.penalizers.items():
        twin = advanced.penalizers.get(kind)
        # Not prepared in the view: no admitted row has such a penalty.
        if penalizer.is_prepared() and twin is not None and twin.is_prepared():
            _scatter_rows(penalizer, twin, rows)


def _scatter_rows(penalizer: Any, twin: Any, rows: list[int]) -> None:
    for name, value in vars(twin).items():
        if isinstance(value, torch.Tensor):
            whole = getattr(penalizer, name)
            index = torch.tensor(rows, device=whole.device)
            setattr(penalizer, name, whole.index_copy(0, index, value))
