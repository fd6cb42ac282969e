"""Every place we touch SGLang, as one table.

`docs/hooks.md` is made from these rows and checked against them. A row is looked up
by its id. Its function is imported only when the row is installed, so reading the
table costs nothing.
"""

from __future__ import annotations

from sglang_taper.engine.hook_rows import SCHEDULER_HOOKS
from sglang_taper.engine.hook_types import Hook, Kind, Role, relied_on

__all__ = ["HOOKS", "Hook", "Kind", "Role", "hook"]

_TOK = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ARGS = "sglang.srt.server_args.ServerArgs"
_ENGINE = "sglang_taper.engine"


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
        kind=Kind.AROUND,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.front_end_driver:generate_request_hook",
        why="metadata and SLO headers are checked before SGLang normalises the "
        "request; an error here is a 400 on every route. AROUND because a request "
        "that names a front end is answered by several",
        removable_when="a request-validation extension point sees HTTP headers, and "
        "SGLang serves programs",
    ),
    Hook(
        id="front-end-abort",
        target=f"{_TOK}.abort_request",
        kind=Kind.BEFORE,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.front_end_driver:abort_program_hook",
        why="SGLang knows the requests of the parts, the client that of the whole",
        removable_when="SGLang aborts groups",
    ),
    relied_on(
        id="prompt-tokens",
        target=f"{_TOK}._tokenize_texts",
        role=Role.TOKENIZER,
        why="the ids that SGLang itself would give the text of a prompt",
        removable_when="SGLang has a public function for it",
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
        why="the only place each copy of n>1 passes singly; every request is stamped "
        "with its arrival here, which SGLang does not send on",
        removable_when="SGLang stamps a sibling index on the copies",
    ),
    Hook(
        id="group-rank",
        target=f"{_TOK}._create_tokenized_object",
        kind=Kind.AFTER,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.dp_ranks:keep_group_together_hook",
        why="branches must reach the data-parallel rank that holds their prefix; all "
        "requests, single or in a batch, are made here",
        removable_when="SGLang routes related requests to one data-parallel rank",
    ),
    relied_on(
        id="named-rank",
        target="sglang.srt.managers.data_parallel_controller.DataParallelController"
        ".maybe_external_dp_rank_routing",
        role=Role.TOKENIZER,
        why="a request that names its rank goes there under every balancing method",
        removable_when="SGLang routes related requests to one data-parallel rank",
    ),
    Hook(
        id="prompt-ids",
        target=f"{_TOK}._tokenize_one_request",
        kind=Kind.AROUND,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.token_ids:tokenize_hook",
        why="a text that begins with generated text gets the ids the model generated; "
        "AROUND because they go in and the ids that were sent come out",
        removable_when="clients can continue a request by its id",
    ),
    Hook(
        id="answer-ids",
        target=f"{_TOK}._handle_batch_output",
        kind=Kind.BEFORE,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.token_ids:remember_finished_hook",
        why="the ids of a finished answer must be known before its client goes on",
        removable_when="clients can continue a request by its id",
    ),
    Hook(
        id="abort-usage",
        target=f"{_TOK}._handle_abort_req",
        kind=Kind.AROUND,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.token_ids:count_prompt_hook",
        why="usage counts the prompt of n>1 as that of its first sample, which may "
        "have been cancelled in the queue; AROUND because the request is gone after",
        removable_when="answers of queued aborts tell prompt_tokens",
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
        function=f"{_ENGINE}.front_end_driver:refuse_before_stream_hook",
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
        id="page-without-key",
        target="sglang.srt.utils.auth.add_api_key_middleware",
        kind=Kind.AFTER,
        role=Role.TOKENIZER,
        function=f"{_ENGINE}.watch:page_without_key_hook",
        why="a browser sends no key with a page it opens; ours holds no data and asks "
        "for the key, so it alone is answered before the check",
        removable_when="a route of SGLang can be public",
    ),
    relied_on(
        id="sample-order",
        target=f"{_TOK}._handle_batch_request",
        role=Role.TOKENIZER,
        why="sends the samples of n>1 in the order of their index, after a request "
        "without new tokens, all with one sampling-parameters object",
        removable_when="SGLang stamps a sibling index on the copies",
    ),
    relied_on(
        id="abort-route",
        target="sglang.srt.entrypoints.http_server.abort_request",
        role=Role.TOKENIZER,
        why="the route that also takes a group; bodies without one are passed on",
        removable_when="SGLang aborts groups",
    ),
    *SCHEDULER_HOOKS,
)


def hook(id: str) -> Hook:
    """The row with this id; KeyError when there is none."""
    return {row.id: row for row in HOOKS}[id]
