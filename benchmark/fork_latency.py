"""Fork latency against stock SGLang: time until all children have their first token.

    python benchmark/fork_latency.py [--quick] [--repeat N] [--json FILE] [--markdown]

Two servers with the same model run side by side, ours and stock SGLang (the plugin's
policy `none`); each cell is measured on one and then on the other, in turns. A cell is
a fan-out, a prefix length in tokens and a situation:

- `cold`: all children are sent together, each the prefix and four tokens of its own,
  and nothing of it is cached;
- `warm`: a parent that generated 16 tokens from the prefix has just finished; children
  continue its token ids, each with four tokens of its own;
- `n`: one request for `n` samples of a prefix that is not cached.

Latency is the client's: from sending until the last child has its first token, over
streaming HTTP; no row is deferred. "prefilled" sums the prompt tokens that the children
ran through prefill, not what a parent or the first pass of `n` computed before them.
Prefixes are random token ids, new ones for every measurement, and the cache is emptied
before each. Of `--repeat` measurements the table has the median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sglang_taper.demo.table import plain_table
from sglang_taper.frontend.branch import with_branch
from sglang_taper.ids import new_group, new_rid
from sglang_taper.protocol import BranchMeta, fork_meta
from sglang_taper.server_process import ServerProcess

SITUATIONS = ("cold", "warm", "n")
FAN_OUTS, PREFIXES = (2, 8, 32), (128, 1024, 4096)
QUICK_FAN_OUTS, QUICK_PREFIXES = (2, 8), (128, 512)
OWN_TOKENS, PARENT_TOKENS, CHILD_TOKENS = 4, 16, 4
# Ordinary words of the default model.
TOKEN_IDS = range(1000, 40_000)
WAIT_S = 1200
HEADER = (
    *("situation", "fan-out", "prefix", "ours ms", "stock ms", "ours / stock"),
    *("ours prefilled", "stock prefilled"),
)


@dataclass(frozen=True)
class Cell:
    """What is measured: one row of the table."""

    situation: str
    fan_out: int
    prefix_tokens: int


@dataclass
class Measured:
    """Repeated measurements of a cell on one server."""

    latency_ms: list[float] = field(default_factory=list)
    prefilled_tokens: list[int] = field(default_factory=list)


Results = dict[Cell, dict[str, Measured]]


def pool_tokens(cells: Sequence[Cell]) -> int:
    """KV tokens that even private copies of the widest fork fit into."""
    own = OWN_TOKENS + PARENT_TOKENS + CHILD_TOKENS
    return 4096 + max(c.fan_out * (c.prefix_tokens + own) for c in cells)


# -- one measurement


def body_of(
    input_ids: Sequence[int], meta: BranchMeta | None, max_new_tokens: int, **more: Any
) -> dict[str, Any]:
    """A greedy /generate request; stock SGLang ignores the metadata."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    params |= more.pop("sampling", {})
    if meta is not None:
        params = with_branch(params, meta)
    return {"input_ids": list(input_ids), "sampling_params": params, **more}


async def child_bodies(
    http: httpx.AsyncClient, cell: Cell, numbers: random.Random
) -> list[dict[str, Any]]:
    """The requests of the fork; for `warm` the parent has been run to its end."""
    prefix, *own = (
        numbers.choices(TOKEN_IDS, k=count)
        for count in (cell.prefix_tokens, *[OWN_TOKENS] * cell.fan_out)
    )
    if cell.situation == "n":
        return [body_of(prefix, None, CHILD_TOKENS, sampling={"n": cell.fan_out})]
    source, parent = BranchMeta(group=new_group()), None
    if cell.situation == "warm":
        parent = new_rid()
        body = body_of(prefix, source, PARENT_TOKENS, rid=parent)
        answer = await http.post("/generate", json=body)
        answer.raise_for_status()
        prefix = prefix + answer.json()["output_ids"]
    metas = fork_meta(source, cell.fan_out, 1, parent)
    return [
        body_of(prefix + ids, meta, CHILD_TOKENS)
        for ids, meta in zip(own, metas, strict=True)
    ]


async def events_of(
    http: httpx.AsyncClient, content: bytes
) -> list[tuple[float, dict[str, Any]]]:
    """Everything one stream sent, with the time it came (`perf_counter` s)."""
    events = []
    kind = {"content-type": "application/json"}
    async with http.stream(
        "POST", "/generate", content=content, headers=kind
    ) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                events.append((time.perf_counter(), json.loads(line[6:])))
    return events


def first_token_times(
    events: Iterable[tuple[float, dict[str, Any]]],
) -> dict[int, float]:
    """Time of the first token of each index."""
    times: dict[int, float] = {}
    for at, event in events:
        if "error" in event:
            raise RuntimeError(f"the server answered {event['error']}")
        if event["meta_info"]["completion_tokens"]:
            times.setdefault(event.get("index", 0), at)
    return times


def prefilled_tokens(events: Iterable[tuple[float, dict[str, Any]]]) -> Iterator[int]:
    """Of each finished child. Without our figure, what was not found in the cache."""
    for _, event in events:
        meta = event["meta_info"]
        if meta["finish_reason"] is not None:
            uncached = meta["prompt_tokens"] - meta["cached_tokens"]
            yield meta.get("taper", {}).get("tokens_prefilled", uncached)


async def measure_once(
    http: httpx.AsyncClient, cell: Cell, numbers: random.Random
) -> tuple[float, int]:
    """(ms until all children had their first token, tokens that they prefilled)."""
    await empty_cache(http)
    bodies = await child_bodies(http, cell, numbers)
    contents = [json.dumps({**body, "stream": True}).encode() for body in bodies]
    began = time.perf_counter()
    streams = await asyncio.gather(*(events_of(http, c) for c in contents))
    times = [at for events in streams for at in first_token_times(events).values()]
    prefilled = [p for events in streams for p in prefilled_tokens(events)]
    if not len(times) == len(prefilled) == cell.fan_out:
        raise RuntimeError(
            f"{len(prefilled)} of {cell.fan_out} children came to an end"
        )
    return 1000 * (max(times) - began), sum(prefilled)


async def empty_cache(http: httpx.AsyncClient) -> None:
    """SGLang refuses to while it is still busy with the end of the last request."""
    deadline = time.monotonic() + 60
    while (await http.post("/flush_cache")).is_error:
        if time.monotonic() > deadline:
            raise RuntimeError("the server did not become idle within a minute")
        await asyncio.sleep(0.1)


# -- all of them


async def measure(
    urls: Mapping[str, str],
    cells: Sequence[Cell],
    repeats: int,
    note: Callable[[str], None],
) -> Results:
    """Every cell on every server, in turns; `note` gets a line per cell."""
    numbers = random.Random(0)
    results: Results = {cell: {name: Measured() for name in urls} for cell in cells}
    limits = httpx.Limits(max_connections=None)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits)
            )
            for name, url in urls.items()
        }
        for http, kind in itertools.product(clients.values(), SITUATIONS):
            await measure_once(http, Cell(kind, 2, 32), numbers)  # the first is slower
        for cell in cells:
            for repeat in range(repeats):
                for name in list(urls)[:: -1 if repeat % 2 else 1]:
                    found = await measure_once(clients[name], cell, numbers)
                    results[cell][name].latency_ms.append(found[0])
                    results[cell][name].prefilled_tokens.append(found[1])
            note("  ".join(row_of(cell, results[cell])))
    return results


def row_of(cell: Cell, found: Mapping[str, Measured]) -> list[str]:
    ours, stock = (statistics.median(found[n].latency_ms) for n in ("ours", "stock"))
    prefilled = [
        f"{statistics.median(found[n].prefilled_tokens):.0f}" for n in ("ours", "stock")
    ]
    times = [f"{ours:.0f}", f"{stock:.0f}", f"{ours / stock:.2f}"]
    return [*map(str, astuple(cell)), *times, *prefilled]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts_of(results: Results) -> list[dict[str, Any]]:
    """JSON-safe: each cell with every single measurement."""
    return [
        {**asdict(cell), **{name: asdict(m) for name, m in found.items()}}
        for cell, found in results.items()
    ]


async def measure_in_new_servers(
    args: argparse.Namespace, cells: Sequence[Cell], note: Callable[[str], None]
) -> Results:
    size = ("--max-total-tokens", str(pool_tokens(cells)))
    policies = {"ours": args.branch_policy, "stock": "none"}
    servers: dict[str, ServerProcess] = {}
    try:
        for name, policy in policies.items():
            flags = (*size, "--branch-policy", policy)
            servers[name] = ServerProcess(args.model_path, flags)
            await servers[name].ready(lambda line, n=name: note(n + line))
        urls = {name: server.url for name, server in servers.items()}
        return await measure(urls, cells, args.repeat, note)
    finally:
        for server in servers.values():
            server.stop(keep_log=False)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--fan-outs", type=int, nargs="+", metavar="N")
    add("--prefixes", type=int, nargs="+", metavar="TOKENS")
    add("--situations", nargs="+", choices=SITUATIONS, default=SITUATIONS)
    add("--quick", action="store_true", help="a smaller grid")
    add("--repeat", type=int, default=1, help="runs of each cell")
    add("--json", metavar="FILE", help="also write all measurements")
    add("--markdown", action="store_true", help="print Markdown")
    add("--model-path", default="smollm2", help="model of both")
    add("--branch-policy", default="eager", help="policy of ours")
    args = parser.parse_args(argv)
    args.fan_outs = args.fan_outs or (QUICK_FAN_OUTS if args.quick else FAN_OUTS)
    args.prefixes = args.prefixes or (QUICK_PREFIXES if args.quick else PREFIXES)
    return args


def main() -> int:
    args = parse_args()
    # Whoever ends this ends its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    grid = itertools.product(args.situations, args.fan_outs, args.prefixes)
    cells = [Cell(*values) for values in grid]

    note = functools.partial(print, file=sys.stderr, flush=True)
    results = asyncio.run(measure_in_new_servers(args, cells, note))
    rows = [row_of(cell, found) for cell, found in results.items()]
    if args.markdown:
        print(markdown_table(rows))
    else:
        print(plain_table("fork latency", HEADER, [(r[0], r[1:]) for r in rows]))
    if args.json:
        Path(args.json).write_text(json.dumps(facts_of(results), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
