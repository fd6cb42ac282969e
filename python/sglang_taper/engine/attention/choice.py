"""Which attention a server uses, and which wishes for one are refused at start-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_taper.config import TaperConfig, flag_of
from sglang_taper.errors import UnsupportedMode

FLAG = flag_of("shared_prefix_attention")
NEEDS_CUDA = ("triton", "flashinfer")


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
        reason = _why_not_torch(server_args)
    if reason is not None:
        yield UnsupportedMode(FLAG, wanted, reason)


def _why_not_on_gpu(server_args: Any) -> str | None:
    device = server_args.device
    if device != "cuda":
        return f"auto, off or torch on the device {device}: it needs CUDA"
    return "auto or off: not built yet for CUDA"


def _why_not_torch(server_args: Any) -> str | None:
    device = server_args.device
    if device != "cpu":
        return f"auto or off on the device {device}: torch runs on the CPU"
    for flag in ("attention", "decode_attention", "prefill_attention"):
        backend = getattr(server_args, f"{flag}_backend", None)
        if backend not in (None, "torch_native"):
            name = f"--{flag.replace('_', '-')}-backend"
            return f"auto or off with {name} {backend}: torch extends torch_native"
    return None
