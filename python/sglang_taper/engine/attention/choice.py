"""Which attention a server uses, and which wishes for one are refused at start-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from sglang_taper.config import TaperConfig, flag_of
from sglang_taper.engine.attention.cpu_ops import why_not_native
from sglang_taper.errors import UnsupportedMode

FLAG = flag_of("shared_prefix_attention")
NEEDS_CUDA = ("triton", "flashinfer")


class CudaMode(msgspec.Struct, frozen=True):
    """A mode of SGLang in which decode steps on CUDA do not share prefixes."""

    flag: str
    is_on: Callable[[Any], bool]
    reason: str


CUDA_MODES = (
    CudaMode(
        "--kv-cache-dtype",
        lambda args: args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"),
        "KV must have the type of the model",
    ),
    CudaMode(
        "--enable-deterministic-inference",
        lambda args: args.enable_deterministic_inference,
        "how a prefix is read depends on who shares it",
    ),
    CudaMode(
        "--dcp-size",
        lambda args: args.dcp_size > 1,
        "a rank has only a part of each context",
    ),
    CudaMode(
        "--enable-two-batch-overlap",
        lambda args: args.enable_two_batch_overlap,
        "halves of a step are planned apart",
    ),
    CudaMode(
        "--enable-unified-memory",
        lambda args: args.enable_unified_memory,
        "the request table does not name KV slots",
    ),
)


def refused_attention(
    config: TaperConfig, server_args: Any
) -> Iterator[UnsupportedMode]:
    """The reason why the attention asked for can not be had, if so.

    `server_args` are SGLang's, resolved. `auto` and `off` can always be had.
    """
    wanted = config.shared_prefix_attention
    if wanted in ("auto", "off"):
        return
    reason = None
    if not config.enabled:
        reason = "auto or off with --branch-policy none, which hooks nothing"
    elif wanted in NEEDS_CUDA:
        reason = _why_not_on_gpu(server_args)
    else:
        reason = _why_not_on_cpu(wanted, server_args)
    if reason is not None:
        yield UnsupportedMode(FLAG, wanted, reason)


def _why_not_on_gpu(server_args: Any) -> str | None:
    device = server_args.device
    if device != "cuda":
        return f"auto, off, native or torch on the device {device}: it needs CUDA"
    backend = server_args.decode_attention_backend or server_args.attention_backend
    if backend != "flashinfer":
        return (
            f"auto or off with the decode attention {backend}: it extends flashinfer, "
            "so give --decode-attention-backend flashinfer too"
        )
    for mode in CUDA_MODES:
        if mode.is_on(server_args):
            return f"auto or off with {mode.flag}: {mode.reason}"
    return None


def _why_not_on_cpu(wanted: str, server_args: Any) -> str | None:
    device = server_args.device
    if device != "cpu":
        return f"auto or off on the device {device}: {wanted} runs on the CPU"
    for flag in ("attention", "decode_attention", "prefill_attention"):
        backend = getattr(server_args, f"{flag}_backend", None)
        if backend not in (None, "torch_native"):
            name = f"--{flag.replace('_', '-')}-backend"
            return f"auto or off with {name} {backend}: {wanted} extends torch_native"
    missing = why_not_native() if wanted == "native" else None
    return f"auto, torch or off on this machine: {missing}" if missing else None
