"""Start a branch as a decode row, without any prefill.

When all tokens of a branch but the last are computed, its first decode step does
what a prefill of that token would do: the row aliases the slots of the tree, and
the last token is handed to the step as the pending one. With pages of several
tokens the tree ends at a page; the rest of the page is copied from a running branch
that has the same tokens (copy on write), since a page has one writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_taper.engine.prefix import namespace_of, num_common, num_computed

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


def needs_prefill(req: Req) -> bool:
    """Whether `req` asks for something that only a prefill gives it.

    Penalties count the last prompt token where a prefill ends; the others want
    outputs of the prefill itself, or state that SGLang sets up there.
    """
    params = req.sampling_params
    has_penalty = (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )
    return bool(
        has_penalty
        or req.output_ids
        or params.max_new_tokens == 0
        or (req.return_logprob and _wants_input_logprobs(req))
        or req.return_hidden_states
        or req.return_routed_experts
        or req.return_sampling_mask
        or req.token_indices_to_pool is not None
        or req.multimodal_inputs is not None
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.session is not None
        or req.beam_group is not None
        or req.lora_id is not None
        or req.needs_host_load_back()
    )


def _wants_input_logprobs(req: Req) -> bool:
    return bool(req.logprob_start_len < len(req.origin_input_ids))


def find_donor(
    req: Req, num_matched: int, running: Sequence[Req], page_size: int
) -> Req | None:
    """A running branch of the group that has computed all of `req` but its last
    token, where the tree's match ends in the page before that token."""
    wanted = len(req.origin_input_ids) - 1
    if not 0 < wanted - num_matched < page_size:
        return None
    for other in running:
        if not _is_sibling(req, other) or num_computed(other) < wanted:
            continue
        if num_common(req.origin_input_ids, other) >= wanted:
            return other
    return None


def _is_sibling(req: Req, other: Req) -> bool:
    return (
        other.taper.group is req.taper.group
        and other.kv.holds_kv
        and not other.finished()
        and namespace_of(other) == namespace_of(req)
    )


def start_rows(
    engine: Scheduler, reqs: list[Req], donors: dict[Req, Req]
) -> ScheduleBatch:
    """A batch whose rows are ready to decode, to be merged into the running batch.

    `reqs` are admitted and locked, and no batch holds them. Side effects: a row and
    the slots of its partly filled page for each; the page is copied from `donors`.
    """
    for req in reqs:
        req.extend_end = len(req.origin_input_ids) - 1
        req.time_stats.set_forward_entry_time()
    batch = ScheduleBatch.init_new(
        reqs,
        engine.req_to_token_pool,
        engine.token_to_kv_pool_allocator,
        engine.tree_cache,
        engine.model_config,
        engine.enable_overlap,
        engine.spec_algorithm,
    )
    # With nothing to extend this only allocates, aliases and describes the rows.
    batch.prepare_for_extend()
    _forget_prefill(batch)
    _copy_pages(engine, donors)
    _hand_over_last_tokens(engine, batch)
    for req in reqs:
        req.time_stats.set_prefill_finished_time()
        if req.return_logprob:
            _prepare_logprobs(engine, req)
    return batch


def _forget_prefill(batch: ScheduleBatch) -> None:
    batch.forward_mode = ForwardMode.DECODE
    batch.prefill_input_ids_cpu = None
    batch.input_ids = batch.out_cache_loc = None
    batch.extend_num_tokens = None
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype)


def _copy_pages(engine: Scheduler, donors: dict[Req, Req]) -> None:
    if not donors:
        return
    table = engine.req_to_token_pool.req_to_token
    pool = engine.token_to_kv_pool_allocator.get_kvcache()
    with _after_forward(engine):
        source, target = [], []
        for req, donor in donors.items():
            part = slice(req.prefix_len, req.extend_end)
            source.append(table[donor.kv.req_pool_idx, part])
            target.append(table[req.kv.req_pool_idx, part])
        pool.move_kv_cache(torch.cat(target).long(), torch.cat(source).long())
    for req in donors:
        req.cached_tokens += req.extend_len


def _hand_over_last_tokens(engine: Scheduler, batch: ScheduleBatch) -> None:
    tokens = [req.origin_input_ids[-1] for req in batch.reqs]
    with _after_forward(engine):
        payload = RelayPayload(bonus_tokens=torch.tensor(tokens, device=batch.device))
        engine.future_map.stash(batch.req_pool_indices, payload)


def _after_forward(engine: Scheduler) -> AbstractContextManager[Any]:
    """In stream order behind the forward in flight, which may still write the KV that
    is copied, or the last token of the row's former owner."""
    if not engine.enable_overlap:
        return nullcontext()
    engine.forward_stream.wait_stream(engine.schedule_stream)
    context: AbstractContextManager[Any] = engine.forward_stream_ctx
    return context


def _prepare_logprobs(engine: Scheduler, req: Req) -> None:
    processor = engine.batch_result_processor.logprob_result_processor
    processor._initialize_empty_logprob_containers(req)
