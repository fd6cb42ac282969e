"""An attention that can not be had is refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_taper.config import TaperConfig
from sglang_taper.engine.attention.choice import refused_attention


def reasons(wanted: str, policy: str = "taper", **args: Any) -> list[str]:
    values = {"device": "cpu", "attention_backend": "torch_native", **args}
    config = TaperConfig(branch_policy=policy, shared_prefix_attention=wanted)
    return [str(e) for e in refused_attention(config, SimpleNamespace(**values))]


@pytest.mark.parametrize("wanted", ["auto", "off"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_and_off_can_always_be_had(wanted: str, device: str) -> None:
    assert reasons(wanted, device=device, attention_backend="fa3") == []
    assert reasons(wanted, "none", device=device) == []


def test_torch_can_be_had_on_the_cpu_with_torch_native() -> None:
    assert reasons("torch") == []
    assert reasons("torch", decode_attention_backend="torch_native") == []


@pytest.mark.parametrize(
    ("wanted", "args", "reason"),
    [
        ("triton", {}, "on the device cpu: it needs CUDA"),
        ("flashinfer", {}, "on the device cpu: it needs CUDA"),
        ("triton", {"device": "cuda"}, "not built yet for CUDA"),
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
