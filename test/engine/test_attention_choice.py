"""An attention that can not be had is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_taper.config import TaperConfig
from sglang_taper.engine.attention.choice import refused_attention
from sglang_taper.engine.attention.cpu_ops import NATIVE, TORCH, choose_ops
from sglang_taper.engine.attention.use import check_wish
from sglang_taper.errors import UnsupportedMode
from sglang_taper.ops.native_library import find_library

ON_CUDA = {
    "device": "cuda",
    "attention_backend": "flashinfer",
    "decode_attention_backend": None,
    "kv_cache_dtype": "auto",
    "enable_deterministic_inference": False,
    "dcp_size": 1,
    "enable_two_batch_overlap": False,
    "enable_unified_memory": False,
}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The reason that is then given."""
    monkeypatch.setenv("CC", "/nowhere/cc")
    find_library.cache_clear()
    yield "no C compiler: /nowhere/cc not found"
    find_library.cache_clear()


def reasons(wanted: str, policy: str = "taper", **args: Any) -> list[str]:
    values = {"device": "cpu", "attention_backend": "torch_native", **args}
    config = TaperConfig(branch_policy=policy, shared_prefix_attention=wanted)
    return [str(e) for e in refused_attention(config, SimpleNamespace(**values))]


@pytest.mark.parametrize("wanted", ["auto", "off"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_and_off_can_always_be_had(wanted: str, device: str) -> None:
    assert reasons(wanted, device=device, attention_backend="fa3") == []
    assert reasons(wanted, "none", device=device) == []


@pytest.mark.parametrize("wanted", ["native", "torch"])
def test_both_ways_on_the_cpu_can_be_had_with_torch_native(wanted: str) -> None:
    assert reasons(wanted) == []
    assert reasons(wanted, decode_attention_backend="torch_native") == []


def test_native_is_refused_where_it_can_not_be_compiled(no_compiler: str) -> None:
    (reason,) = reasons("native")
    assert f"auto, torch or off on this machine: {no_compiler}" in reason
    assert reasons("auto") == reasons("torch") == []


def test_torch_stands_in_where_native_can_not_be_compiled_and_says_so(
    no_compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = choose_ops("auto", torch.float32)
    assert (chosen.name, chosen.why_not_native) == ("torch", no_compiler)
    (record,) = caplog.records
    assert no_compiler in record.getMessage()


def test_torch_stands_in_for_types_that_the_kernel_does_not_read() -> None:
    assert choose_ops("auto", torch.float32, torch.bfloat16) is NATIVE
    chosen = choose_ops("auto", torch.bfloat16, torch.float8_e5m2)
    assert chosen.why_not_native == "the type bfloat16, float8_e5m2"


def test_torch_can_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_ops("torch", torch.float32) is TORCH
    assert caplog.records == []


@pytest.mark.parametrize("wanted", ["triton", "flashinfer"])
def test_both_ways_on_cuda_can_be_had_with_flashinfer(wanted: str) -> None:
    assert reasons(wanted, **ON_CUDA) == []
    split = {"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}
    assert reasons(wanted, **{**ON_CUDA, **split}) == []


@pytest.mark.parametrize("backend", [None, object()])
def test_a_wish_that_the_model_has_overruled_is_refused(backend: Any) -> None:
    config = TaperConfig(branch_policy="taper", shared_prefix_attention="triton")
    if backend is None:
        with pytest.raises(UnsupportedMode, match="another attention for this model"):
            check_wish(config, backend)
    else:
        check_wish(config, backend)
    for wanted in ("auto", "off"):
        any_wish = TaperConfig(branch_policy="taper", shared_prefix_attention=wanted)
        check_wish(any_wish, backend)


@pytest.mark.parametrize(
    ("wanted", "args", "reason"),
    [
        ("triton", {}, "on the device cpu: it needs CUDA"),
        ("flashinfer", {}, "on the device cpu: it needs CUDA"),
        (
            "triton",
            {**ON_CUDA, "attention_backend": "fa3"},
            "decode attention fa3: it extends flashinfer",
        ),
        (
            "flashinfer",
            {**ON_CUDA, "decode_attention_backend": "triton"},
            "give --decode-attention-backend flashinfer too",
        ),
        (
            "flashinfer",
            {**ON_CUDA, "kv_cache_dtype": "fp8_e4m3"},
            "--kv-cache-dtype: KV must have the type of the model",
        ),
        (
            "triton",
            {**ON_CUDA, "enable_deterministic_inference": True},
            "--enable-deterministic-inference",
        ),
        ("triton", {**ON_CUDA, "dcp_size": 2}, "--dcp-size"),
        (
            "flashinfer",
            {**ON_CUDA, "enable_two_batch_overlap": True},
            "--enable-two-batch-overlap",
        ),
        (
            "flashinfer",
            {**ON_CUDA, "enable_unified_memory": True},
            "--enable-unified-memory",
        ),
        ("torch", {"device": "cuda"}, "torch runs on the CPU"),
        ("torch", {"attention_backend": "intel_amx"}, "torch extends torch_native"),
        (
            "torch",
            {"decode_attention_backend": "flex_attention"},
            "--decode-attention-backend flex_attention",
        ),
    ],
)
def test_a_refusal_names_the_flag_and_the_reason(
    wanted: str, args: dict[str, Any], reason: str
) -> None:
    (error,) = reasons(wanted, **args)
    assert error.startswith(f"--shared-prefix-attention='{wanted}'")
    assert reason in error


def test_without_a_branch_policy_nothing_is_hooked() -> None:
    (error,) = reasons("torch", "none")
    assert "--branch-policy none" in error
