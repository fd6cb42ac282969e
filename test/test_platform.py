"""The CPU platform: when it is chosen, and what it fills in."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.server_args import ServerArgs

from sglang_taper import platform
from sglang_taper.platform.cpu import DEFAULT_MAX_TOTAL_TOKENS, TaperCpuPlatform

needs_no_gpu = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="needs a machine without an accelerator"
)


def _set_hardware(
    monkeypatch: pytest.MonkeyPatch, cuda: bool = False, other: bool = False
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: cuda or other)


def _resolve(**given: Any) -> Any:
    """What SGLang makes of these arguments once every default is filled in."""
    args = ServerArgs(**given)
    args.resolve_once()
    return resolving_view(args)


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """A directory that is enough of a Llama for argument resolution: its config."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama",'
        ' "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,'
        ' "intermediate_size": 128, "vocab_size": 128, "dtype": "bfloat16"}'
    )
    return str(tmp_path)


def test_a_machine_without_accelerator_gets_our_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _set_hardware(monkeypatch)
    path = platform.activate()
    assert path == f"{TaperCpuPlatform.__module__}.{TaperCpuPlatform.__name__}"


@pytest.mark.parametrize("hardware", ["cuda", "other"])
def test_any_accelerator_keeps_sglangs_own_platform(
    monkeypatch: pytest.MonkeyPatch, hardware: str
) -> None:
    _set_hardware(monkeypatch, **{hardware: True})
    assert platform.activate() is None


def test_asking_for_sglangs_cpu_engine_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_hardware(monkeypatch)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


def test_the_platform_is_registered_as_an_entry_point() -> None:
    found = {entry.name: entry for entry in entry_points(group="sglang.srt.platforms")}
    assert found["sglang_taper_cpu"].load() is platform.activate


def test_sglang_accepts_the_class_as_an_out_of_tree_cpu_platform() -> None:
    ours = TaperCpuPlatform()
    assert isinstance(ours, SRTPlatform)
    assert ours.is_out_of_tree()
    assert ours.get_torch_distributed_backend_str() == "gloo"
    assert not ours.is_pin_memory_available("cpu")
    assert not ours.capabilities.supports_triton
    assert not ours.capabilities.graph_capture
    free, total = ours.get_available_memory()
    assert 0 < free <= total


@pytest.mark.slow
@needs_no_gpu
def test_a_model_path_alone_resolves_to_arguments_that_run_here(
    model_dir: str,
) -> None:
    args = _resolve(model_path=model_dir)
    assert args.device == "cpu"
    assert args.attention_backend == "torch_native"
    assert args.sampling_backend == "pytorch"
    assert args.max_total_tokens == DEFAULT_MAX_TOTAL_TOKENS
    assert not args.disable_overlap_schedule


@pytest.mark.slow
@needs_no_gpu
def test_what_the_user_says_about_memory_is_kept(model_dir: str) -> None:
    assert _resolve(model_path=model_dir, max_total_tokens=512).max_total_tokens == 512
    by_fraction = _resolve(model_path=model_dir, mem_fraction_static=0.5)
    assert by_fraction.max_total_tokens is None
    assert by_fraction.mem_fraction_static == 0.5


@pytest.mark.slow
@needs_no_gpu
def test_another_attention_backend_of_the_user_is_kept(model_dir: str) -> None:
    args = _resolve(model_path=model_dir, attention_backend="flex_attention")
    assert args.attention_backend == "flex_attention"


def test_pytorchs_profiler_can_be_asked_for() -> None:
    ours = TaperCpuPlatform()
    activity = getattr(
        torch.profiler.ProfilerActivity, ours.get_torch_profiler_activity_str()
    )
    assert (
        activity
        == ours.get_torch_profiler_activity()
        == torch.profiler.ProfilerActivity.CPU
    )
