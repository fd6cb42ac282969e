"""What a demo shows on a running server, and the facts it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console

import sglang_taper
from sglang_taper.demo.compare import Comparison, flush_cache, verdict
from sglang_taper.demo.display import board_for
from sglang_taper.demo.load import (
    FULL,
    QUICK,
    SerialRequest,
    all_of,
    make_mix,
    send_serial,
)
from sglang_taper.demo.options import DemoOptions
from sglang_taper.demo.score import Slo, describe_slo, mean_serial_tpot_ms
from sglang_taper.demo.steps import state_of
from sglang_taper.demo.table import policy_rows, print_table, program_rows
from sglang_taper.demo.writing import SERIAL_PROMPTS, write_article
from sglang_taper.frontend.client import ServerError, TaperClient

SILENCE_S = 120.0
RESTORE_TIMEOUT_S = 5.0
# As many rows as part one has in its narrowest steps; the first round warms up.
PROBE_PROMPTS = (*SERIAL_PROMPTS, "A list of topics:")
PROBE_TOKENS = (4, 32)
# The probe decodes undisturbed; in part one prefills come between.
STALL_ALLOWANCE = 1.15


async def play(options: DemoOptions, url: str, console: Console) -> None:
    """Run both parts, print their tables, write the JSON file if asked for one.

    Puts the server's policy and SLOs back at the end. Raises DemoError or ServerError
    when the server does not do its part.
    """
    key = options.api_key
    async with (
        TaperClient(url, api_key=key, timeout_s=SILENCE_S) as client,
        _policy_restored(client),
    ):
        demo = _Demo(options, url, console, client)
        facts = {
            "version": sglang_taper.__version__,
            "model_path": options.model_path,
            "url": url,
            "program": await demo.write(),
            "comparison": await demo.compare(),
        }
    if options.json:
        Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")


@contextlib.asynccontextmanager
async def _policy_restored(client: TaperClient) -> AsyncIterator[None]:
    params = (await state_of(client))["params"]
    try:
        yield
    finally:
        changed = ("policy", "ttft_slo_ms", "tpot_slo_ms")
        # The server may be the reason why we leave.
        with contextlib.suppress(ServerError, TimeoutError):
            async with asyncio.timeout(RESTORE_TIMEOUT_S):
                await client.set_policy(**{name: params[name] for name in changed})


class _Demo:
    """Both parts, on one server and one console."""

    def __init__(
        self, options: DemoOptions, url: str, console: Console, client: TaperClient
    ) -> None:
        self._options, self._url = options, url
        self._console, self._client = console, client

    def _note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _slo(self, off_tpot_ms: float) -> Slo:
        tpot_ms = self._options.tpot_slo_ms
        if tpot_ms is None:
            tpot_ms = self._options.tpot_slo_factor * off_tpot_ms
        return Slo(self._options.ttft_slo_ms, tpot_ms)

    async def write(self) -> dict[str, Any]:
        """Part one: the forking program under `taper`."""
        topic = self._options.topic
        self._note(f"\nPart 1: a program forks over the outline of: {topic}")
        slo = self._slo(STALL_ALLOWANCE * await self._probe())
        self._note(_targets(slo))
        await self._client.set_policy(
            policy="taper", ttft_slo_ms=slo.ttft_ms, tpot_slo_ms=slo.planned_tpot_ms
        )
        with board_for(self._console) as board:
            facts = await write_article(
                self._client,
                url=self._url,
                api_key=self._options.api_key,
                topic=topic,
                slo=slo,
                board=board,
                note=self._note,
            )
        title = "The forking program under policy taper"
        print_table(self._console, title, ("", "taper"), program_rows(facts))
        return facts

    async def _probe(self) -> float:
        """Mean TPOT in ms of a few serial requests, after a warm-up."""
        await self._client.set_policy(policy="off")
        tpot_ms = 0.0
        for num_tokens in PROBE_TOKENS:
            requests = [SerialRequest(prompt, num_tokens) for prompt in PROBE_PROMPTS]
            records = await all_of(
                *(send_serial(self._client, r, "probe") for r in requests)
            )
            tpot_ms = mean_serial_tpot_ms(records)
        return tpot_ms

    async def compare(self) -> dict[str, Any]:
        """Part two: one mix under three policies."""
        options = self._options
        mix = make_mix(QUICK if options.quick else FULL, options.seed)
        self._note(
            f"\nPart 2: {len(mix.serial)} serial and {len(mix.forks)} forking requests "
            f"({mix.num_tokens} tokens) under each policy"
        )
        comparison = Comparison(
            self._client,
            mix,
            lambda: flush_cache(self._url, options.api_key),
            self._note,
        )
        off_tpot_ms = await comparison.measure_off()
        slo = self._slo(off_tpot_ms)
        self._note(
            f"{_targets(slo)}; serial requests take {off_tpot_ms:.0f} under off, "
            f"taper plans with {slo.planned_tpot_ms:.0f}"
        )
        await comparison.compare(slo, options.rounds)
        params = (await state_of(self._client))["params"]
        policies = comparison.facts(slo)
        title = (
            f"{_targets(slo)}; {params['deadline']} deadlines, rho {params['rho']:g}"
        )
        print_table(self._console, title, ("", *policies), policy_rows(policies))
        self._note(verdict(policies))
        return {
            "slo": describe_slo(slo),
            "off_serial_tpot_ms": off_tpot_ms,
            "params": params,
            "seed": options.seed,
            "quick": options.quick,
            "num_tokens": mix.num_tokens,
            "policies": policies,
            "verdict": verdict(policies),
        }


def _targets(slo: Slo) -> str:
    return f"SLOs: TTFT {slo.ttft_ms:.0f} ms, TPOT {slo.tpot_ms:.0f} ms"
