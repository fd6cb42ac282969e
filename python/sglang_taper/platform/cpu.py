"""The platform class SGLang loads on a machine without an accelerator."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TaperCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on CPU: no graphs, no Triton, no pinned memory."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        pass
