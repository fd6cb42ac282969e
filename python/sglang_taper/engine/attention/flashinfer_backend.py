"""SGLang's FlashInfer attention, with decode steps that read a shared prefix once.

Takes the place of SGLang's class under the same name. Plain steps, prefill, KV writes
and everything around a layer are SGLang's; both of our ways to share sit on it, because
it is the plain attention they are measured against.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import (
    DecodeMetadata,
    FlashInferAttnBackend,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel

from sglang_taper import config as settings
from sglang_taper.config import TaperConfig
from sglang_taper.engine.attention.choice import FLAG
from sglang_taper.engine.attention.decoder import MAX_ROWS, Decoder
from sglang_taper.engine.attention.flashinfer_decoder import FlashInferDecoder
from sglang_taper.engine.attention.gate import StepGate
from sglang_taper.engine.attention.shared_decode import SharedDecode
from sglang_taper.engine.attention.shared_steps import SharedSteps
from sglang_taper.engine.attention.slot_copies import SlotCopies
from sglang_taper.engine.attention.support import (
    unsupported_backend,
    unsupported_layers,
    unsupported_runner,
)
from sglang_taper.engine.attention.triton_decoder import TritonDecoder
from sglang_taper.errors import UnsupportedMode
from sglang_taper.ops.flashinfer_levels import FlashInferShape
from sglang_taper.ops.triton_decode import AttentionShape
from sglang_taper.policy.attention_profile import (
    MeasuredAttention,
    find_measured,
    heads_label,
    measured_from_profile,
)

# Lists of KV slots may name a slot several times; twice the pool is ample, and a step
# that needs more is SGLang's own.
TOKENS_PER_SLOT = 2


class SharedPrefixFlashInferBackend(SharedDecode, FlashInferAttnBackend):
    """One per model runner; a backend of SGLang that derives from it shares nothing."""

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        if type(self) is SharedPrefixFlashInferBackend:
            self._share(model_runner, settings.load())

    def _share(self, runner: Any, config: TaperConfig) -> None:
        wanted = config.shared_prefix_attention
        self.shared_prefix_attention = "triton" if wanted == "triton" else "flashinfer"
        layers = attention_layers(runner)
        unsupported = (
            unsupported_backend(self)
            or unsupported_runner(runner, get_parallel().attn_dcp_size)
            or unsupported_layers(layers)
        )
        if unsupported and wanted != "auto":
            accepted = f"auto or off with this model: {unsupported}"
            raise UnsupportedMode(FLAG, wanted, accepted)
        gate, decoder = StepGate(wanted != "auto"), None
        if unsupported is None:
            if wanted == "auto":
                gate = StepGate(False, measured(config, layers[0]))
            if not gate.never:
                decoder = self._make_decoder(runner, layers[0])
        copies = SlotCopies(self.req_to_token_pool.req_to_token)
        sharing = SharedSteps(gate, decoder, copies, unsupported)
        self.share_prefixes(sharing, decoder)

    def _make_decoder(self, runner: Any, layer: Any) -> Decoder:
        heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
        table = self.req_to_token_pool.req_to_token
        max_rows = min(MAX_ROWS, len(table))
        if self.shared_prefix_attention == "triton":
            shape = AttentionShape(*heads, layer.v_head_dim)
            return TritonDecoder(shape, runner.dtype, table, max_rows=max_rows)
        return FlashInferDecoder(
            FlashInferShape(*heads, runner.dtype, layer.logit_cap or 0.0),
            self.workspace_buffer,
            table,
            max_rows=max_rows,
            max_tokens=TOKENS_PER_SLOT * runner.max_total_num_tokens,
        )

    def make_metadata(self, wrappers: Any) -> DecodeMetadata:
        return DecodeMetadata(wrappers)

    def init_cuda_graph_state(self, *args: Any, **kwargs: Any) -> None:
        """Allocate what graphs share. A plain graph's list of KV slots is not read when
        a sharing one replays: ours reads its request table there."""
        super().init_cuda_graph_state(*args, **kwargs)
        if self.sharing is not None and isinstance(self._decoder, TritonDecoder):
            slots = self.cuda_graph_kv_indices[0]
            self._decoder.use_memory(slots, self.max_context_len)


def attention_layers(runner: Any) -> list[Any]:
    modules = runner.model.modules()
    return [module for module in modules if isinstance(module, RadixAttention)]


def measured(config: TaperConfig, layer: Any) -> MeasuredAttention | None:
    """Constants for this device and these layers from the file of the settings."""
    if config.attention_profile is None:
        return None
    profile = settings.read_json(config.attention_profile, "attention_profile")
    heads = heads_label(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
    device = torch.cuda.get_device_name()
    name = FlashInferDecoder.measured_as
    return find_measured(measured_from_profile(profile), device, heads, name)
