"""Every place we touch SGLang, as one table.

`docs/hooks.md` is made from these rows and checked against them. A row is looked up
by its id. Its function is imported only when the row is installed, so reading the
table costs nothing.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    """Which process a hook belongs to."""

    MAIN = "main"  # parses flags, launches the others
    TOKENIZER = "tokenizer"  # main, or each uvicorn worker
    SCHEDULER = "scheduler"  # one per rank


class Kind(StrEnum):
    """How a hook is put in place. OVERRIDE rows belong to a replaced class."""

    REPLACE = "replace"
    BEFORE = "before"
    AROUND = "around"
    AFTER = "after"
    OVERRIDE = "override"
    ASSIGN = "assign"
    RELIED_ON = "relied on"  # not touched; its behaviour is assumed


class Hook(msgspec.Struct, frozen=True):
    """One row.

    `function` is `module:attribute` inside this package; None for OVERRIDE and
    RELIED_ON rows, which are here to be fingerprinted. `always` rows exist with
    policy `none` too.
    """

    id: str
    target: str
    kind: Kind
    role: Role
    function: str | None
    why: str
    removable_when: str
    always: bool = False


_SCHED = "sglang.srt.managers.scheduler.Scheduler"
_TOK = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ARGS = "sglang.srt.server_args.ServerArgs"
_ENGINE = "sglang_taper.engine"


def _override(name: str, why: str, removable_when: str) -> Hook:
    return Hook(
        id=f"scheduler-{name.strip('_').replace('_', '-')}",
        target=f"{_SCHED}.{name}",
        kind=Kind.OVERRIDE,
        role=Role.SCHEDULER,
        function=None,
        why=why,
        removable_when=removable_when,
    )


HOOKS: tuple[Hook, ...] = (
    Hook(
        id="flags",
        target=f"{_ARGS}.add_cli_args",
        kind=Kind.AFTER,
        role=Role.MAIN,
        function=f"{_ENGINE}.flags:add_flags_hook",
        why="SGLang has no registration for flags of plugins",
        removable_when="plugins can add argument groups",
        always=True,
    ),
    Hook(
        id="settings",
        target=f"{_ARGS}.from_cli_args",
        kind=Kind.AROUND,
        role=Role.MAIN,
        function=f"{_ENGINE}.flags:from_cli_args_hook",
        why="the parsed namespace is dropped here; AROUND because the model path "
        "must be replaced before SGLang reads it",
        removable_when="plugins can add argument groups",
        always=True,
    ),
    Hook(
        id="engine-keywords",
        target="sglang.srt.entrypoints.engine.Engine.server_args_class",
        kind=Kind.ASSIGN,
        role=Role.MAIN,
        function=f"{_ENGINE}.flags:make_server_args",
        why="Engine(branch_policy=...) would be an unknown keyword; the attribute "
        "is SGLang's own place for it",
        removable_when="plugins can add server arguments",
        always=True,
    ),
    Hook(
        id="refusals",
        target=f"{_ARGS}.check_server_args",
        kind=Kind.AFTER,
        role=Role.MAIN,
        function=f"{_ENGINE}.flags:check_server_args_hook",
        why="modes are refused after SGLang has resolved what is on, in every entry",
        removable_when="a plugin can veto server arguments",
        always=True,
    ),
    Hook(
        id="ranks-run-us",
        target="sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        kind=Kind.AFTER,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.flags:check_ranks_hook",
        why="a rank that SGLang started without our scheduler must not serve",
        removable_when="SGLang fails when a plugin fails",
    ),
    Hook(
        id="calibration",
        target="sglang.srt.entrypoints.http_server._wait_and_warmup",
        kind=Kind.AROUND,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.calibration:calibrate_before_warmup_hook",
        why="the latency model must know the machine before the server says ready",
        removable_when="plugins can add warm-up steps",
    ),
    Hook(
        id="request-metadata",
        target=f"{_TOK}.generate_request",
        kind=Kind.BEFORE,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.requests:prepare_request_hook",
        why="metadata and SLO headers are checked before SGLang normalises the "
        "request; an error here is a 400 on every route",
        removable_when="a request-validation extension point sees HTTP headers",
    ),
    Hook(
        id="request-groups",
        target="sglang.srt.managers.io_struct.GenerateReqInput"
        ".normalize_batch_and_arguments",
        kind=Kind.AFTER,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.requests:assign_groups_hook",
        why="batch size and number of samples are known only afterwards",
        removable_when="samples of n>1 get their own sampling parameters",
    ),
    Hook(
        id="sibling-numbers",
        target=f"{_TOK}._send_one_request",
        kind=Kind.BEFORE,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.requests:number_sibling_hook",
        why="the only place each copy of n>1 passes singly",
        removable_when="SGLang stamps a sibling index on the copies",
    ),
    Hook(
        id="answer-metadata",
        target=f"{_TOK}.update_request_meta_info",
        kind=Kind.AROUND,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.requests:report_branch_hook",
        why="our key must not enter the per-token accumulation",
        removable_when="meta_info takes per-request information",
    ),
    Hook(
        id="generate-refusal",
        target="sglang.srt.entrypoints.http_server.serve_generate_request",
        kind=Kind.AROUND,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.requests:refuse_before_stream_hook",
        why="must answer 400 instead of opening a stream",
        removable_when="/generate validates before it opens the stream",
    ),
    Hook(
        id="completion-metadata",
        target="sglang.srt.entrypoints.openai.serving_completions"
        ".OpenAIServingCompletion._build_completion_response",
        kind=Kind.AFTER,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.requests:report_choices_hook",
        why="adds to the finished response",
        removable_when="OpenAI responses carry meta_info",
    ),
    Hook(
        id="chat-metadata",
        target="sglang.srt.entrypoints.openai.serving_chat"
        ".OpenAIServingChat._build_chat_response",
        kind=Kind.AFTER,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.requests:report_choices_hook",
        why="adds to the finished response",
        removable_when="OpenAI responses carry meta_info",
    ),
    Hook(
        id="control-channel",
        target="sglang.srt.managers.tokenizer_control_mixin"
        ".TokenizerControlMixin.init_communicators",
        kind=Kind.AFTER,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.routes:attach_control_hook",
        why="adds our communicator to the ones just built, and our routes to the app",
        removable_when="plugins can declare communicators and routes",
    ),
    Hook(
        id="sample-order",
        target=f"{_TOK}._handle_batch_request",
        kind=Kind.RELIED_ON,
        role=Role.TOKENIZER,
        function=None,
        why="sends the samples of n>1 in the order of their index, after a request "
        "without new tokens, all with one sampling-parameters object",
        removable_when="SGLang stamps a sibling index on the copies",
    ),
    Hook(
        id="abort-route",
        target="sglang.srt.entrypoints.http_server.abort_request",
        kind=Kind.RELIED_ON,
        role=Role.TOKENIZER,
        function=None,
        why="the route that also takes a group; bodies without one are passed on",
        removable_when="SGLang aborts groups",
    ),
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
    _override("run_batch", "when a step starts", "SGLang exports step times"),
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
)


def hook(id: str) -> Hook:
    """The row with this id; KeyError when there is none."""
    return {row.id: row for row in HOOKS}[id]
