"""SGLang's scheduler with a branch policy: small overrides that call the original.

What is decided is in `BranchController`, and what it does to a batch in `apply`. The
table in `hooks.py` says why each override exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import (
    SchedulerOutputStreamer,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.rank_consensus_checker import rank_consensus
from sglang.utils import TypeBasedDispatcher

from sglang_taper.config import TaperConfig
from sglang_taper.config import load as load_config
from sglang_taper.engine import first_k
from sglang_taper.engine.apply import admit_rows
from sglang_taper.engine.arrival import checked_metadata, take_metadata
from sglang_taper.engine.attention import use as attention
from sglang_taper.engine.clock import TaperTick
from sglang_taper.engine.controller import BranchController
from sglang_taper.engine.forks import ForkAdmission
from sglang_taper.engine.groups import arrives_aborted
from sglang_taper.engine.machine import describe
from sglang_taper.engine.messages import (
    EXPLAIN,
    LIVE,
    TaperControlReq,
    TaperControlReqOutput,
    register_message_types,
)
from sglang_taper.engine.metrics import StepMetrics
from sglang_taper.engine.pins import PinTable
from sglang_taper.engine.prefix import PrefixTree
from sglang_taper.engine.step_model import make_latency_model
from sglang_taper.engine.streamer import TaperOutputStreamer
from sglang_taper.errors import FieldError, TaperError
from sglang_taper.policy.types import AdmissionPlan
from sglang_taper.protocol import ARRIVED_KEY, CALLED_KEY

UNLIMITED_TOKENS = 1 << 30


class TaperScheduler(Scheduler):
    """One per rank. `self.taper` holds everything that is ours."""

    taper: BranchController

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        register_message_types()
        self._attention = attention.shared_prefix_backend(self.tp_worker.model_runner)
        self._shared_tokens = attention.SharedTokens(self._attention)
        config = load_config()
        attention.check_wish(config, self._attention)
        self.taper = self._make_controller(config)
        self._forks = ForkAdmission(self, self.taper)
        self._taper_metrics = StepMetrics(self.metrics_reporter.enable_metrics)
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (TaperTick, self.taper.clock.accept),
                (TaperControlReq, self._handle_taper_control),
            ]
        )

    def _make_controller(self, config: TaperConfig) -> BranchController:
        return BranchController(
            config=config,
            model=make_latency_model(
                config,
                self.tp_worker.get_decode_cuda_graph_bs(),
                shared_read_once=attention.may_share(self._attention),
            ),
            num_ranks=get_parallel().tp_size,
            asynchronous=self.enable_overlap and self.device != "cpu",
            pins=PinTable(
                PrefixTree(self.tree_cache),
                int(config.max_pinned_fraction * self.max_total_num_tokens),
            ),
            page_size=self.page_size,
        )

    def get_init_info(self) -> dict[str, Any]:
        return super().get_init_info() | {"taper": self.taper.params.policy}

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return TaperOutputStreamer

    def init_output_streamer(self) -> None:
        super().init_output_streamer()
        self.output_streamer.controller = self.taper

    # -- requests come and go

    def _create_generation_req(self, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        req = super()._create_generation_req(recv_req, *args, **kwargs)
        params = req.sampling_params
        limit = params.max_new_tokens
        raw = take_metadata(req)
        called_ms = raw.pop(CALLED_KEY, None)
        arrived_ms = raw.pop(ARRIVED_KEY, None)
        req.taper = self.taper.attach(
            req.rid,
            checked_metadata(raw),
            self.taper.clock.now_ms if arrived_ms is None else float(arrived_ms),
            UNLIMITED_TOKENS if limit is None else limit,
        )
        if arrives_aborted(req.taper, called_ms):
            req.to_finish = FINISH_ABORT()
        elif first_k.is_unwanted(req):
            first_k.end_with_next_pass(req)
        return req

    def send_abort_output(self, abort_req: AbortReq, req: Any) -> None:
        super().send_abort_output(abort_req, req)
        self.taper.end(req)

    def abort_request(self, recv_req: AbortReq) -> None:
        with _exact_ids_only(self._taper_requests(), recv_req):
            super().abort_request(recv_req)
        # It may have been a fork for which the queue behind it had to wait.
        self.running_batch.batch_is_full = False

    def _taper_requests(self) -> list[Any]:
        """Everything that waits or runs, each once."""
        reqs = [*self.waiting_queue, *self.grammar_manager.grammar_queue]
        reqs += [*self.collect_inflight_reqs(), *self.running_batch.reqs]
        if self.chunked_req is not None:
            reqs.append(self.chunked_req)
        return list({id(req): req for req in reqs}.values())

    def flush_cache(self, empty_cache: bool = True) -> bool:
        flushed = super().flush_cache(empty_cache)
        if flushed:
            self.taper.flushed()
        return flushed

    def _record_scheduler_state_for_paused_engine(self) -> None:
        super()._record_scheduler_state_for_paused_engine()
        self.taper.timer.forget_open_step()

    def on_idle(self) -> None:
        super().on_idle()
        self.taper.timer.forget_open_step()
        if self.is_fully_idle():
            self.taper.settle()

    # -- prefill

    def get_next_batch_to_run(self, *args: Any, **kwargs: Any) -> NextBatchPlan:
        # Here every request waits, or is in one of two batches.
        if self.taper.decided:
            first_k.cancel_unwanted(self, self._taper_requests())
        return super().get_next_batch_to_run(*args, **kwargs)

    def get_prefill_adder_class(self) -> Any:
        if not self.is_generation:
            return super().get_prefill_adder_class()
        return self._forks.adder_class

    def get_num_allocatable_reqs(self, *args: Any, **kwargs: Any) -> int:
        num_rows: int = super().get_num_allocatable_reqs(*args, **kwargs)
        return num_rows - self._forks.num_rows_taken

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        if self.taper.expire_pins():
            running_batch.batch_is_full = False
        while True:
            with self._forks.prefill_pass(running_batch):
                plan = super().get_new_batch_prefill(running_batch)
            if not self._forks.is_stuck(plan):
                break
        plan.running_batch = self._forks.start(plan.running_batch)
        return plan

    # -- one step

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        self._forks.make_room_to_decode(batch)
        with _unprepared(batch):
            ready = super().update_running_batch(batch)
        if ready is None or ready.is_empty():
            return ready
        return admit_rows(ready, self._plan_step(ready).rows)

    @rank_consensus(same_results=["result.rows", "result.reason"])
    def _plan_step(self, batch: ScheduleBatch) -> AdmissionPlan:
        self._shared_tokens.note(batch)
        return self.taper.plan(
            batch,
            self.waiting_queue,
            lambda rows: self._shared_tokens.each_reads(batch, rows),
        )

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        is_decode = batch.forward_mode.is_decode()
        num_tokens = None if is_decode else batch.extend_num_tokens or 0
        self.taper.launched(num_tokens, self._sched_idled)
        attention.announce(self._attention, batch)
        return super().run_batch(batch, *args, **kwargs)

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        if self.taper.timer.asynchronous and result.copy_done is not None:
            result.copy_done.synchronize()
        self.taper.result_ready()
        super().process_batch_result(batch, result)
        self._taper_metrics.update(self.taper)

    def _poll_timeout_aborts(self) -> list[Any]:
        messages: list[Any] = super()._poll_timeout_aborts()
        # A prefill just launched joins the running batch within this iteration.
        if self.taper.clock.shared and (self.running_batch.reqs or self.last_batch):
            messages.append(self.taper.make_tick())
        return messages

    # -- control

    def _handle_taper_control(self, message: TaperControlReq) -> TaperControlReqOutput:
        try:
            self._do_taper_control(message.action, message.params)
        except TaperError as error:
            return TaperControlReqOutput(rid=message.rid, error=str(error))
        state = describe(self, message.action, message.params)
        return TaperControlReqOutput(rid=message.rid, state=state)

    def _do_taper_control(self, action: str, params: dict[str, Any]) -> None:
        if action == "policy":
            self.taper.change_policy(params)
        elif action == "abort_group":
            self._abort_group(**params)
        elif action not in (known := ("state", LIVE, EXPLAIN)):
            accepted = "one of policy, abort_group, " + ", ".join(known)
            raise FieldError("action", action, accepted)

    def _abort_group(
        self,
        group: str,
        now_ms: float,
        parent: str | None = None,
        scope: str | None = None,
    ) -> None:
        """Abort a group, or only `parent` and what descends from it.

        `scope`: whose group; None: of every caller who has one of that id.
        """
        for name in self.taper.groups.named(group, scope):
            self._abort_named(name, now_ms, parent)

    def _abort_named(self, name: str, now_ms: float, parent: str | None) -> None:
        members = self.taper.abort_group(name, now_ms, parent)
        for req in self._taper_requests():
            branch = getattr(req, "taper", None)
            if branch is None or branch.meta.group != name:
                continue
            if members is None or req.rid in members:
                self.abort_request(AbortReq(rid=req.rid))


@contextmanager
def _unprepared(batch: ScheduleBatch) -> Iterator[None]:
    """Keep SGLang from preparing all rows: only those admitted will be."""
    batch.prepare_for_decode = lambda: None
    try:
        yield
    finally:
        del batch.prepare_for_decode


@contextmanager
def _exact_ids_only(reqs: list[Any], abort: AbortReq) -> Iterator[None]:
    """SGLang aborts every id that *starts with* the given one: hide the others."""
    hidden = []
    if not abort.abort_all:
        hidden = [r for r in reqs if r.rid != abort.rid and r.rid.startswith(abort.rid)]
    for req in hidden:
        req.rid = "\0" + req.rid
    try:
        yield
    finally:
        for req in hidden:
            req.rid = req.rid[1:]
