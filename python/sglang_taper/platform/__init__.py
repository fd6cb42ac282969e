"""Out-of-tree CPU platform: stock SGLang on a machine without any accelerator.

Entry point of the group `sglang.srt.platforms`. On a machine with CUDA it returns
None and SGLang's own platform is used. Needs no environment variable.
"""

from __future__ import annotations


def activate() -> str | None:
    """Dotted path of the platform class, or None to stay out of the way."""
    import torch

    if torch.cuda.is_available():
        return None
    return "sglang_taper.platform.cpu.TaperCpuPlatform"
