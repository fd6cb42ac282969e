"""SGLang's scheduler without a server and without a model.

`ForkEngine` is `TaperScheduler` assembled from SGLang's own parts that decide about KV:
radix tree, pools, admission, batches, result processing, retraction. What would talk
to other processes is silent, time is set by hand, and the forward is `TruthWorker`.
"""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fork_parts import MAX_CONTEXT, RandomWidth, Shape, make_pools, make_tree
from kv_truth import STOP_TOKEN, VOCAB_SIZE, TruthWorker
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (
    NewTokenRatioTracker,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.utils import TypeBasedDispatcher

from sglang_taper.engine.clock import TaperTick
from sglang_taper.engine.scheduler import TaperScheduler
from sglang_taper.policy.types import LatencyCoefficients
from sglang_taper.protocol import ARRIVED_KEY

# Share of the tokens a row may still generate that admission keeps free for it:
# at first, at least, and what is taken off it at every decode step.
RATIO = {"init": 0.1, "min": 0.02, "decay": 0.01, "current": 0.1}

# What a scheduler without disaggregation, speculation, LoRA, ... has in these places.
_OFF = (
    *("enable_hierarchical_cache", "enable_lmcache", "enable_hicache_storage"),
    *("enable_unified_cache_external_linker", "enable_hisparse", "enable_lora"),
    *("enable_unified_memory", "enable_priority_scheduling", "enable_overlap_mlx"),
    *("abort_on_priority_when_disabled", "schedule_low_priority_values_first"),
    *("attn_dp_enabled", "enable_session_radix_cache", "enable_fpm", "enable_pdmux"),
    *("require_mlp_sync", "is_hybrid_swa", "is_hybrid_ssm", "_sched_idled"),
    *("_war_barrier_enabled", "skip_tokenizer_init"),
)
_NONE = (
    *("dllm_config", "draft_worker", "hisparse_coordinator", "decode_offload_manager"),
    *("prefill_delayer", "min_free_slots_delayer", "dynamic_chunk_sizer"),
    *("metrics_collector", "rust_server", "mm_receiver", "scripted_scheduler_hook"),
    *("forward_sleep_time", "truncation_align_size", "sliding_window_size"),
    *("full_tokens_per_layer", "swa_tokens_per_layer", "tokenizer", "lora_drainer"),
    *("priority_scheduling_preemption_threshold", "server_args"),
    *("idle_sleeper", "kv_checksum_computer", "_prev_step"),
    *("_prev_prefill_end_ts", "_pause_started_at"),
)
_SILENT = (
    *("metrics_reporter", "load_publisher", "load_inquirer", "profiler_manager"),
    *("grammar_manager", "dllm_manager", "ngram_embedding_manager", "ipc_channels"),
    *("kv_events_publisher", "weight_updater", "publish_load_snapshot"),
    "_record_step_counters",
)


class Silent:
    """Takes any call, answers nothing."""

    enable_metrics = enable_kv_cache_events = False
    num_generated_tokens = forward_ct_decode = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class ForkEngine(TaperScheduler):
    """Make it inside `engine_settings` of the same shape."""

    def __init__(self, shape: Shape) -> None:
        self._set_sizes(shape)
        self._set_absent()
        self.req_to_token_pool, self.token_to_kv_pool_allocator = make_pools(shape)
        self.tree_cache = make_tree(
            shape, self.req_to_token_pool, self.token_to_kv_pool_allocator
        )
        self.tp_worker = self.model_worker = TruthWorker(
            self.req_to_token_pool, self.token_to_kv_pool_allocator.get_kvcache()
        )
        self.forward_stream = self.schedule_stream = torch.cpu.Stream()
        self.init_running_status()
        self.init_chunked_prefill()
        self.init_schedule_policy()
        # Admit so boldly that memory does run out now and then.
        self.new_token_ratio_tracker = NewTokenRatioTracker(**RATIO)
        self.init_overlap()
        self.init_dp_attn_adapter()
        self.init_pool_stats_observer()
        self.init_invariant_checker()
        with mock.patch.object(Scheduler, "init_request_dispatcher", _no_dispatcher):
            self.init_request_dispatcher()
        self.init_output_streamer()
        self.init_batch_result_processor()
        self.enable_skip_finishing_decode = shape.overlap
        self.width = self.taper.policy = RandomWidth()
        self.taper.clock.shared = True
        self.now_ms = 0.0
        self.pass_time(1.0)

    def _set_sizes(self, shape: Shape) -> None:
        self.page_size, self.enable_overlap = shape.page_size, shape.overlap
        self.max_total_num_tokens = shape.num_tokens
        self.max_running_requests = shape.num_rows
        self.max_prefill_tokens = 4 * shape.chunk
        self.max_req_len, self.max_req_input_len = MAX_CONTEXT, MAX_CONTEXT - 1
        self.max_queued_requests = self.max_new_tokens_limit = None
        self.device, self.schedule_policy = "cpu", "fcfs"
        self.spec_algorithm = SpeculativeAlgorithm.from_string(None)
        self.disaggregation_mode = DisaggregationMode.NULL
        self.model_config = SimpleNamespace(
            vocab_size=VOCAB_SIZE,
            hf_eos_token_id={STOP_TOKEN},
            is_multimodal=False,
            is_encoder_decoder=False,
            think_end_ids=None,
            self_opened_think_start_ids=None,
            _resolved_model_impl="sglang",
        )
        self.processed_tokens_counter = self.forward_ct = 0
        self.kv_shard_widening = 1
        self.stream_interval = 1
        self.is_generation = True

    def _set_absent(self) -> None:
        """What this engine has not: off, none, or silent."""
        for name in _OFF:
            setattr(self, name, False)
        for name in _NONE:
            setattr(self, name, None)
        for name in _SILENT:
            setattr(self, name, Silent())
        self.ngram_embedding_manager.prepare_for_forward = lambda batch, **_: batch
        self.scheduler_stage_metrics = Silent()
        self.scheduler_stage_metrics.record = nullcontext
        self.grammar_manager.grammar_queue = []

    # -- what a client and the event loop do

    def pass_time(self, seconds: float) -> None:
        self.now_ms += 1000 * seconds
        self.taper.clock.accept(TaperTick(self.now_ms, LatencyCoefficients(), 0.0))

    def send(
        self,
        rid: str,
        tokens: list[int],
        max_new_tokens: int,
        meta: dict[str, Any],
        seed: int | None = None,
        salt: str | None = None,
    ) -> Any:
        """A request as it comes from the tokenizer process; the `Req` made of it."""
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            sampling_seed=seed,
            custom_params={"taper": {**meta, ARRIVED_KEY: self.now_ms}},
        )
        params.normalize(None)
        self.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text="",
                input_ids=array("q", tokens),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                cache_salt=salt,
                time_stats=None,
            )
        )
        return self.waiting_queue[-1]

    def abort(self, rid: str) -> None:
        self.abort_request(AbortReq(rid=rid))

    def step(self) -> bool:
        """One turn of SGLang's event loop; False when it had nothing to run."""
        plan = self.get_next_batch_to_run(self.running_batch, self.last_batch)
        self.running_batch = plan.running_batch
        batch = plan.batch_to_run
        is_idle = not batch and not (self.enable_overlap and self.last_batch)
        if is_idle:
            self.on_idle()
        elif self.enable_overlap:
            self._overlapped(batch)
        else:
            self.process_batch_result(batch, self.run_batch(batch))
        self.last_batch = batch
        return not is_idle

    def _overlapped(self, batch: ScheduleBatch | None) -> None:
        at_once = self.is_disable_overlap_for_batch(batch, self.last_batch)
        if at_once:
            self.process_batch_result(*self.result_queue.popleft())
        if batch:
            result = self.run_batch(batch)
            self.result_queue.append((batch.copy(), result))
        if self.last_batch and not at_once:
            self.process_batch_result(*self.result_queue.popleft())


def _no_dispatcher(engine: ForkEngine) -> None:
    engine._request_dispatcher = TypeBasedDispatcher([])
