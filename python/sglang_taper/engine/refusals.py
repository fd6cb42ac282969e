"""Modes of SGLang a branch policy does not work with, refused at start-up.

Each leaves rows of the running batch outside the step in a way SGLang's loop for
that mode would lose or duplicate; the reason is told to the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from sglang_taper.errors import UnsupportedMode


class Refusal(msgspec.Struct, frozen=True):
    """One refused mode: `is_on` reads the resolved server arguments."""

    flag: str
    is_on: Callable[[Any], bool]
    accepted: str


def _value(name: str, off: object) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, off) not in (off, None, False, "")


def _more_than_one(*names: str) -> Callable[[Any], bool]:
    return lambda args: any((getattr(args, name, 1) or 1) > 1 for name in names)


REFUSALS = (
    Refusal(
        "--disaggregation-mode",
        _value("disaggregation_mode", "null"),
        "null: the loops of a prefill/decode split keep only the rows that ran",
    ),
    Refusal(
        "--enable-pdmux",
        _value("enable_pdmux", False),
        "off: its loop keeps only the rows that ran",
    ),
    Refusal(
        "--pp-size",
        _more_than_one("pp_size"),
        "1: each micro-batch has a running batch of its own",
    ),
    Refusal(
        "--attn-dp-size",
        lambda args: bool(
            getattr(args, "enable_dp_attention", False)
            or _more_than_one("attn_dp_size")(args)
        ),
        "1: attention data parallelism turns decode batches into prefill batches",
    ),
    Refusal(
        "--enable-mixed-chunk",
        _value("enable_mixed_chunk", False),
        "off: a mixed step runs every decode row and bypasses the policy",
    ),
    Refusal(
        "--dllm-algorithm",
        _value("dllm_algorithm", None),
        "none: diffusion models do not decode one token per step",
    ),
    Refusal(
        "--tokenizer-worker-num",
        lambda args: bool(
            (getattr(args, "api_key", None) or getattr(args, "admin_api_key", None))
            and _more_than_one("tokenizer_worker_num")(args)
        ),
        "1 with --api-key or --admin-api-key: several workers of SGLang check no key",
    ),
    Refusal(
        "--speculative-algorithm",
        _value("speculative_algorithm", None),
        "none: a step then yields a varying number of tokens per row, which the "
        "step-latency model does not know yet",
    ),
)

RUST_SERVER = Refusal(
    "SGLANG_RUST_SERVER",
    lambda env: str(env).lower() in ("1", "true", "yes", "on"),
    "unset: the Rust server has no place for plugins",
)


def refused(server_args: Any, rust_server: object = "") -> Iterator[UnsupportedMode]:
    """Every refused mode that is on. `rust_server` is the value of its variable."""
    for refusal in REFUSALS:
        if refusal.is_on(server_args):
            name = refusal.flag.removeprefix("--").replace("-", "_")
            value = getattr(server_args, name, True)
            yield UnsupportedMode(refusal.flag, value, _sentence(refusal))
    if RUST_SERVER.is_on(rust_server):
        yield UnsupportedMode(RUST_SERVER.flag, rust_server, _sentence(RUST_SERVER))


def _sentence(refusal: Refusal) -> str:
    return (
        f"a branch policy needs {refusal.accepted}. "
        "Change it, or use --branch-policy none."
    )
