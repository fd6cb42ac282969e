"""What computes attention on the CPU: our C kernel, or PyTorch where that can not be.

The kernel needs a C compiler, the OpenMP runtime of PyTorch and a CPU with AVX.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from sglang_taper.ops import native_attention, torch_decode, torch_extend
from sglang_taper.ops.native_library import Library, NativeUnavailable, find_library

logger = logging.getLogger(__name__)


class CpuOps(NamedTuple):
    """`name` is that of `--shared-prefix-attention`; the modules of `ops` have
    `make_plan` and `decode`, `make_extend_plan` and `extend`. `why_not_native` is None
    unless PyTorch stands in."""

    name: str
    decode: Any
    extend: Any
    why_not_native: str | None = None


NATIVE = CpuOps("native", native_attention, native_attention)
TORCH = CpuOps("torch", torch_decode, torch_extend)


def choose_ops(wanted: str, *dtypes: torch.dtype) -> CpuOps:
    """`wanted` as the flag; `dtypes` are those of queries and KV.

    Compiles the kernel if this machine has not done so before. Logs if PyTorch has to
    stand in.
    """
    if wanted == TORCH.name:
        return TORCH
    reason = why_not_native(*dtypes)
    if reason is None:
        return NATIVE
    logger.warning("Attention runs in PyTorch, which is slower: %s", reason)
    return TORCH._replace(why_not_native=reason)


def why_not_native(*dtypes: torch.dtype) -> str | None:
    """The reason why the C kernel can not serve these types on this machine, if so."""
    library = find_library()
    if isinstance(library, NativeUnavailable):
        return str(library)
    assert isinstance(library, Library)
    if not library.serves(*dtypes):
        return "the type " + ", ".join(str(d).removeprefix("torch.") for d in dtypes)
    return None
