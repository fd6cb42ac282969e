"""The rows of the table of hooks that belong to a scheduler process."""

from __future__ import annotations

from sglang_taper.engine.attention_rows import CPU_ATTENTION_HOOKS, CUDA_ATTENTION_HOOKS
from sglang_taper.engine.hook_types import Hook, Kind, Role, overridden, relied_on

_SCHED = "sglang.srt.managers.scheduler.Scheduler"
_ENGINE = "sglang_taper.engine"


def _override(name: str, why: str, removable_when: str) -> Hook:
    id = f"scheduler-{name.strip('_').replace('_', '-')}"
    return overridden(id, f"{_SCHED}.{name}", Role.SCHEDULER, why, removable_when)


SCHEDULER_HOOKS: tuple[Hook, ...] = (
    Hook(
        id="scheduler",
        target=_SCHED,
        kind=Kind.REPLACE,
        role=Role.SCHEDULER,
        function=f"{_ENGINE}.scheduler:TaperScheduler",
        why="one visible subclass instead of many method hooks",
        removable_when="SGLang takes a batch policy object",
    ),
    _override(
        "update_running_batch",
        "its return value is the decode batch that runs, and need not be the "
        "running batch",
        "SGLang takes a batch policy object",
    ),
    _override(
        "_create_generation_req",
        "SGLang's extension point for request-local state",
        "never: it is the documented place",
    ),
    _override(
        "_poll_timeout_aborts",
        "the only input of an iteration that the leader decides and all ranks see",
        "SGLang broadcasts a step clock",
    ),
    _override("init_request_dispatcher", "our control messages", "never"),
    _override(
        "run_batch",
        "when a step starts, and which branches it holds",
        "SGLang exports step times, and tells attention about requests",
    ),
    _override("process_batch_result", "when a step ends", "same as run_batch"),
    _override("abort_request", "exact ids and whole groups", "exact abort upstream"),
    _override("flush_cache", "forget requests between stages", "never"),
    _override("on_idle", "a step whose end was not seen", "same as run_batch"),
    _override("send_abort_output", "requests that end outside the results", "never"),
    _override(
        "_record_scheduler_state_for_paused_engine",
        "a step whose end was not seen: a pause is not a prefill",
        "same as run_batch",
    ),
    _override("get_output_streamer_class", "tokens and meta_info", "never"),
    _override("init_output_streamer", "gives the streamer our controller", "never"),
    _override("get_init_info", "main learns that this rank runs our class", "never"),
    _override(
        "get_next_batch_to_run",
        "the siblings of the first k that have finished end before the next step",
        "SGLang aborts groups",
    ),
    _override(
        "get_new_batch_prefill",
        "siblings wait for what one of them computes; a fork is admitted whole",
        "SGLang holds back requests that would compute the same prefix",
    ),
    _override(
        "get_prefill_adder_class",
        "SGLang's place for another admission; ours lets it judge, and takes branches "
        "that need no prefill",
        "never: it is the documented place",
    ),
    _override(
        "get_num_allocatable_reqs",
        "rows of branches that start without a prefill are not taken yet",
        "SGLang starts requests without a prefill",
    ),
    relied_on(
        "prefill-admission",
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        Role.SCHEDULER,
        "appends an admitted request to `can_run_list` last, budgeted and locked",
        "SGLang starts requests without a prefill",
    ),
    relied_on(
        "rows-without-prefill",
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        Role.SCHEDULER,
        "with nothing to extend it allocates, aliases and describes rows only",
        "SGLang starts requests without a prefill",
    ),
    relied_on(
        "pending-token",
        "sglang.srt.managers.overlap_utils.FutureMap.stash",
        Role.SCHEDULER,
        "hands a row the token that its next decode step consumes",
        "SGLang starts requests without a prefill",
    ),
    relied_on(
        "publish",
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
        ".checkpoint_into_tree",
        Role.SCHEDULER,
        "puts the KV of a running request into the tree and repoints its row",
        "SGLang forks running requests",
    ),
    relied_on(
        "match-key",
        "sglang.srt.mem_cache.common._req_radix_key",
        Role.SCHEDULER,
        "the key under which a request finds its prefix",
        "never: match and lock are the tree's interface",
    ),
    Hook(
        id="retraction-order",
        target="sglang.srt.managers.schedule_batch.ScheduleBatch"
        "._get_decode_retraction_order",
        kind=Kind.AROUND,
        role=Role.SCHEDULER,
        function=f"{_ENGINE}.retraction:keep_one_branch_hook",
        why="the row with the fewest tokens goes first, which is a deferred branch; "
        "a request must not lose its last one while others have several",
        removable_when="SGLang retracts by group",
    ),
    Hook(
        id="penalty-tokens",
        target="sglang.srt.managers.schedule_batch.ScheduleBatch"
        ".cumulate_penalty_output_tokens",
        kind=Kind.AROUND,
        role=Role.SCHEDULER,
        function=f"{_ENGINE}.penalties:cumulate_penalty_output_tokens_hook",
        why="under overlap SGLang feeds the last processed token, which skips or "
        "repeats a token of a row that sat out a step",
        removable_when="penalties are fed by position upstream",
    ),
    *CPU_ATTENTION_HOOKS,
    *CUDA_ATTENTION_HOOKS,
)
