"""A decode step of branches over a long prefix, in two real servers: ours and stock.

Both run every row in every step. The step is timed from the client: what 32 more tokens
of every branch take, divided by 32; once with the branches as one group, once as
requests of nobody, which share nothing in our attention, and once in stock SGLang.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from typing import Any, NamedTuple

import requests

from sglang_taper.frontend.branch import with_branch
from sglang_taper.protocol import BranchMeta
from sglang_taper.server_process import ServerProcess

WIDTH, PREFIX, PROMPT = 8, 2048, 1024
FEW_TOKENS, MANY_TOKENS = 8, 40
TOKEN_IDS = range(1000, 40_000)


class Comparison(NamedTuple):
    """Medians in milliseconds."""

    stock_step_ms: float
    unshared_step_ms: float
    shared_step_ms: float
    stock_prompt_ms: float
    prompt_ms: float


def some_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(TOKEN_IDS, k=count)


def generate_s(
    url: str, prompts: list[list[int]], new_tokens: int, group: str
) -> float:
    """Seconds that one call takes; `group` empty: requests of nobody."""
    sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    sampling["max_new_tokens"] = new_tokens
    params = [
        with_branch(sampling, BranchMeta(group=group, branch=i, width=len(prompts)))
        if group
        else sampling
        for i in range(len(prompts))
    ]
    body = {"input_ids": prompts, "sampling_params": params}
    began = time.perf_counter()
    requests.post(f"{url}/generate", json=body, timeout=1200).raise_for_status()
    return time.perf_counter() - began


def step_ms(url: str, group: str, seed: int) -> float:
    """A decode step of `WIDTH` branches, their prefix cached before."""
    prefix = some_ids(PREFIX, seed)
    prompts = [[*prefix, *some_ids(8, seed + i)] for i in range(WIDTH)]
    generate_s(url, [prefix], 1, "")
    few, many = (
        generate_s(url, prompts, count, group and f"{group}-{count}")
        for count in (FEW_TOKENS, MANY_TOKENS)
    )
    flush(url)
    return 1000 * (many - few) / (MANY_TOKENS - FEW_TOKENS)


def prompt_ms(url: str, seed: int) -> float:
    flush(url)
    return 1000 * generate_s(url, [some_ids(PROMPT, seed)], 1, "")


def flush(url: str) -> None:
    while not requests.post(f"{url}/flush_cache", timeout=60).ok:
        time.sleep(0.1)


def compare_servers(model: str, dtype: str, rounds: int) -> Comparison:
    """Start both servers, measure in turns, end them."""
    flags = ("--dtype", dtype, "--max-total-tokens", "8192")
    policies = {"ours": "eager", "stock": "none"}
    servers: dict[str, ServerProcess] = {}
    try:
        for name, policy in policies.items():
            servers[name] = ServerProcess(model, (*flags, "--branch-policy", policy))
            asyncio.run(servers[name].ready(lambda line: print(line, file=sys.stderr)))
        ours, stock = servers["ours"].url, servers["stock"].url
        measured = [measure_round(ours, stock, seed) for seed in range(rounds)]
    finally:
        for server in servers.values():
            server.stop(keep_log=False)
    return Comparison(*map(statistics.median, zip(*measured, strict=True)))


def measure_round(ours: str, stock: str, seed: int) -> Comparison:
    return Comparison(
        stock_step_ms=step_ms(stock, "", seed),
        unshared_step_ms=step_ms(ours, "", seed),
        shared_step_ms=step_ms(ours, f"g{seed}", seed),
        stock_prompt_ms=prompt_ms(stock, seed),
        prompt_ms=prompt_ms(ours, seed),
    )
