"""Why decode steps of a model can not share a prefix, found when the server starts.

A backend shares in all layers of a model or in none: its CUDA graphs hold all of them,
and a step plans one kind of attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

HEAD_DIMS = (64, 128, 256)
KV_TYPES = (torch.float16, torch.bfloat16)


def unsupported_backend(backend: Any) -> str | None:
    """The first reason in SGLang's FlashInfer backend, as it has set itself up."""
    checks = (
        ("sliding window", backend.use_sliding_window_kv_pool),
        # one for a window or for an encoder, one for everything
        ("sliding window or cross attention", backend.num_wrappers != 1),
        ("multi-item scoring", backend.enable_mis),
        ("diffusion", backend.is_dllm_model),
        ("fp4 KV", backend.decode_uses_dequant_workspace or backend.is_nvfp4_kvcache),
        ("deterministic", backend.enable_deterministic),
        ("translated KV slots", backend.kv_index_translator.is_translating),
    )
    return next((reason for reason, holds in checks if holds), None)


def unsupported_runner(runner: Any, num_context_ranks: int) -> str | None:
    """The first reason in the model runner; `num_context_ranks` share one context."""
    checks = (
        ("draft model", runner.is_draft_worker),
        ("speculative decoding", runner.spec_algorithm.is_speculative()),
        ("MLA", runner.use_mla_backend),
        ("context parallel decoding", num_context_ranks > 1),
        ("KV type", runner.kv_cache_dtype != runner.dtype),
        ("KV type", runner.dtype not in KV_TYPES),
    )
    return next((reason for reason, holds in checks if holds), None)


def unsupported_layers(layers: Iterable[Any]) -> str | None:
    """The first reason in the attention layers of the model, or that they differ."""
    layers = list(layers)
    if not layers:
        return "no attention layers"
    first = _shape(layers[0])
    for layer in layers:
        checks = (
            ("sliding window", layer.sliding_window_size not in (None, -1)),
            ("cross attention", layer.is_cross_attention),
            ("position encoding in attention", layer.pos_encoding_mode != "NONE"),
            ("local attention", layer.use_irope),
            ("head dimension", layer.qk_head_dim not in HEAD_DIMS),
            ("head dimension", layer.v_head_dim != layer.qk_head_dim),
            ("KV scales", not _is_one(layer.k_scale_float, layer.v_scale_float)),
            ("layers differ", _shape(layer) != first),
        )
        for reason, holds in checks:
            if holds:
                return reason
    return None


def _shape(layer: Any) -> tuple[Any, ...]:
    heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
    return (*heads, layer.logit_cap or 0.0)


def _is_one(*scales: float | None) -> bool:
    return all(scale in (None, 1.0) for scale in scales)
