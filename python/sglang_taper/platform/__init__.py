"""Out-of-tree CPU platform: stock SGLang on a machine without any accelerator.

Entry point of the group `sglang.srt.platforms`. Where PyTorch sees an accelerator, or
the user asked for SGLang's own CPU engine, it stays out of the way. Needs no
environment variable.
"""

from __future__ import annotations

import os

# Iterations an idle OpenMP thread spins before it sleeps: tens of microseconds, enough
# to bridge two operators. With the default of milliseconds, two servers on the same
# cores, or a server beside any busy process, slow each other down tenfold and more.
SPIN_COUNT = "10000"


def activate() -> str | None:
    """Dotted path of the platform class, or None to leave SGLang its own choice."""
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    # CUDA first: the general question would initialise the CUDA runtime, which a
    # process that forks later must not have done.
    if torch.cuda.is_available() or torch.accelerator.is_available():
        return None
    # Read by the OpenMP runtime of the processes SGLang spawns.
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # SGLang's own switch: move KV by indexing instead of by a Triton kernel.
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    return "sglang_taper.platform.cpu.TaperCpuPlatform"
