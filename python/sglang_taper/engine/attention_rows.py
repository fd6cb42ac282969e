"""The rows of the table of hooks that belong to shared-prefix attention.

None is installed with `--shared-prefix-attention off`, those of CUDA only where there
is such a device: they need FlashInfer.
"""

from __future__ import annotations

from sglang_taper.engine.hook_types import Hook, Kind, Role, overridden, relied_on

_SRT = "sglang.srt"
_OURS = "sglang_taper.engine.attention"
_TORCH = f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_FLASHINFER = f"{_SRT}.layers.attention.flashinfer_backend"
_BACKEND = f"{_FLASHINFER}.FlashInferAttnBackend"
_RUNNER = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner"


def _override(id: str, target: str, why: str, with_id: str) -> Hook:
    return overridden(id, target, Role.SCHEDULER, why, f"same as {with_id}")


def _relied_on(id: str, target: str, why: str) -> Hook:
    return relied_on(id, target, Role.SCHEDULER, why, "same as attention-cuda")


CPU_ATTENTION_HOOKS: tuple[Hook, ...] = (
    Hook(
        id="attention",
        target=_TORCH,
        kind=Kind.REPLACE,
        role=Role.SCHEDULER,
        function=f"{_OURS}.torch_backend:SharedPrefixTorchBackend",
        why="a subclass under SGLang's own name: what SGLang decides by the name "
        "torch_native stays decided",
        removable_when="SGLang's attention reads a shared prefix once",
    ),
    _override(
        "attention-init-forward-metadata",
        f"{_TORCH}.init_forward_metadata",
        "one plan for all layers of a pass",
        "attention",
    ),
    _override(
        "attention-run-sdpa-forward-decode",
        f"{_TORCH}._run_sdpa_forward_decode",
        "decode reads a prefix once",
        "attention",
    ),
    _override(
        "attention-run-sdpa-forward-extend",
        f"{_TORCH}._run_sdpa_forward_extend",
        "prefill without queries of the cached prefix",
        "attention",
    ),
)

CUDA_ATTENTION_HOOKS: tuple[Hook, ...] = (
    Hook(
        id="attention-cuda",
        target=_BACKEND,
        kind=Kind.REPLACE,
        role=Role.SCHEDULER,
        function=f"{_OURS}.flashinfer_backend:SharedPrefixFlashInferBackend",
        why="a subclass under SGLang's own name: what SGLang decides by the name "
        "flashinfer stays decided",
        removable_when="SGLang's attention reads a shared prefix once",
    ),
    _override(
        "attention-cuda-eager",
        f"{_BACKEND}.init_forward_metadata",
        "a decode step that shares is planned by us",
        "attention-cuda",
    ),
    _override(
        "attention-cuda-graph",
        f"{_BACKEND}.init_forward_metadata_out_graph",
        "the same before a capture or a replay, outside the graph",
        "attention-cuda",
    ),
    _override(
        "attention-cuda-graph-state",
        f"{_BACKEND}.init_cuda_graph_state",
        "its list of KV slots is memory that a sharing graph can use",
        "attention-cuda",
    ),
    Hook(
        id="attention-cuda-variants",
        target=f"{_SRT}.layers.attention.graph_variants"
        ".create_dsv41_candidate_graph_variants",
        kind=Kind.AROUND,
        role=Role.SCHEDULER,
        function=f"{_OURS}.shared_decode:graph_variants_hook",
        why="a plain and a sharing graph for each batch size; it is asked last, and "
        "alone is told the model runner",
        removable_when="an attention backend can name its graph variants",
    ),
    _relied_on(
        "attention-cuda-layers",
        f"{_BACKEND}.forward_decode",
        "writes KV, then calls `forward` of the first wrapper in `forward_metadata`",
    ),
    _relied_on(
        "attention-cuda-metadata",
        f"{_FLASHINFER}.DecodeMetadata",
        "what a decode step leaves in `forward_metadata`",
    ),
    _relied_on(
        "attention-cuda-capture",
        f"{_RUNNER}.DecodeCudaGraphRunner._capture_one_stream",
        "captures the variants of a batch size in their order, each with its name set",
    ),
    _relied_on(
        "attention-cuda-replay",
        f"{_RUNNER}.DecodeCudaGraphRunner.load_batch",
        "selects the variant, plans and chooses the graph, in this order",
    ),
    _relied_on(
        "attention-cuda-replay-view",
        f"{_RUNNER}.build_replay_fb_view",
        "keeps `kv_loc_plan`; padding rows come last and are one token long",
    ),
    _relied_on(
        "attention-cuda-rows",
        f"{_SRT}.mem_cache.kv_index_translator.KVIndexTranslator.own_plan",
        "the plan of a pass names the scheduler's own tensor of rows",
    ),
)
