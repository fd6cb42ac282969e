"""Each thing that decode steps on CUDA do not serve is found when the server starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_taper.engine.attention.support import (
    unsupported_backend,
    unsupported_layers,
    unsupported_runner,
)


def make_layer(**changes: Any) -> Any:
    values = {
        "tp_q_head_num": 32,
        "tp_k_head_num": 8,
        "qk_head_dim": 128,
        "v_head_dim": 128,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "pos_encoding_mode": "NONE",
        "use_irope": False,
        "k_scale_float": None,
        "v_scale_float": None,
    }
    return SimpleNamespace(**values | changes)


def make_backend(**changes: Any) -> Any:
    values = {
        "use_sliding_window_kv_pool": False,
        "num_wrappers": 1,
        "enable_mis": False,
        "is_dllm_model": False,
        "decode_uses_dequant_workspace": False,
        "is_nvfp4_kvcache": False,
        "enable_deterministic": False,
        "kv_index_translator": SimpleNamespace(is_translating=False),
    }
    return SimpleNamespace(**values | changes)


def make_runner(**changes: Any) -> Any:
    speculative = changes.pop("speculative", False)
    values = {
        "is_draft_worker": False,
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: speculative),
        "use_mla_backend": False,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": torch.bfloat16,
    }
    return SimpleNamespace(**values | changes)


def test_an_ordinary_model_is_supported() -> None:
    assert unsupported_backend(make_backend()) is None
    assert unsupported_runner(make_runner(), 1) is None
    assert unsupported_layers([make_layer(), make_layer(k_scale_float=1.0)]) is None
    capped = make_layer(logit_cap=30.0)
    assert unsupported_layers([capped, capped]) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sliding_window_kv_pool": True}, "sliding window"),
        ({"num_wrappers": 2}, "sliding window or cross attention"),
        ({"enable_mis": True}, "multi-item scoring"),
        ({"is_dllm_model": True}, "diffusion"),
        ({"decode_uses_dequant_workspace": True}, "fp4 KV"),
        ({"is_nvfp4_kvcache": True}, "fp4 KV"),
        ({"enable_deterministic": True}, "deterministic"),
        (
            {"kv_index_translator": SimpleNamespace(is_translating=True)},
            "translated KV slots",
        ),
    ],
)
def test_what_a_backend_does_besides_is_named(
    changes: dict[str, Any], reason: str
) -> None:
    assert unsupported_backend(make_backend(**changes)) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_draft_worker": True}, "draft model"),
        ({"speculative": True}, "speculative decoding"),
        ({"use_mla_backend": True}, "MLA"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "KV type"),
        ({"dtype": torch.float32, "kv_cache_dtype": torch.float32}, "KV type"),
    ],
)
def test_what_a_model_runner_does_besides_is_named(
    changes: dict[str, Any], reason: str
) -> None:
    assert unsupported_runner(make_runner(**changes), 1) == reason


def test_contexts_split_over_ranks_are_not_supported() -> None:
    assert unsupported_runner(make_runner(), 2) == "context parallel decoding"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window_size": 4096}, "sliding window"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"pos_encoding_mode": "ALIBI"}, "position encoding in attention"),
        ({"use_irope": True}, "local attention"),
        ({"qk_head_dim": 96, "v_head_dim": 96}, "head dimension"),
        ({"v_head_dim": 64}, "head dimension"),
        ({"k_scale_float": 0.5}, "KV scales"),
        ({"v_scale_float": 2.0}, "KV scales"),
        ({"tp_q_head_num": 64}, "layers differ"),
        ({"logit_cap": 30.0}, "layers differ"),
    ],
)
def test_one_layer_that_is_not_served_is_enough(
    changes: dict[str, Any], reason: str
) -> None:
    layers = [make_layer(), make_layer(**changes), make_layer()]
    assert unsupported_layers(layers) == reason


def test_a_model_without_attention_has_nothing_to_share() -> None:
    assert unsupported_layers([]) == "no attention layers"
