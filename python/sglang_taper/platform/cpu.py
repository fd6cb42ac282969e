"""The platform class SGLang loads on a machine without an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity

DEFAULT_MAX_TOTAL_TOKENS = 65_536


class TaperCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on CPU: no graphs, no Triton, no pinned memory."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """SGLang's pure PyTorch attention, the one that needs no kernel package."""
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        """The device as text: SGLang splits it at a colon when --device is absent."""
        return self.device_type

    def get_torch_profiler_activity_str(self) -> str:
        """What `POST /start_profile` may ask for; SGLang has no default."""
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        """The same for PyTorch's profiler."""
        from torch.profiler import ProfilerActivity

        return ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set the defaults that make `--model-path` the only flag needed.

        Writes `attention_backend` when it is SGLang's x86 default `intel_amx`, whose
        kernels no wheel on PyPI carries, and `max_total_tokens` when neither it nor
        `mem_fraction_static` was given.
        """
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self.get_default_attention_backend()
        if (
            server_args.max_total_tokens is None
            and server_args.mem_fraction_static is None
        ):
            # SGLang would zero seven tenths of the host's memory as KV pool: most of
            # a minute at start-up, and nothing left for other programs.
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
