"""Part two: the same requests under `off`, `eager` and `taper` on the live server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_taper.demo.load import Mix, run_mix
from sglang_taper.demo.score import (
    RequestRecord,
    Slo,
    describe,
    mean_serial_tpot_ms,
    score,
)
from sglang_taper.demo.steps import StepLog, step_facts, step_log
from sglang_taper.frontend.client import ServerError, TaperClient

POLICIES = ("off", "eager", "taper")
KEPT_ATTAINMENT = 0.95
FLUSH_TIMEOUT_S = 30


@dataclass(frozen=True)
class Run:
    """The mix once under one policy."""

    policy: str
    records: list[RequestRecord]
    log: StepLog
    duration_s: float


async def flush_cache(url: str, api_key: str | None) -> None:
    """Empty the prefix cache once the server is idle; raises ServerError if not."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    wait_s = {"timeout": FLUSH_TIMEOUT_S}
    try:
        async with httpx.AsyncClient(timeout=2 * FLUSH_TIMEOUT_S) as http:
            answer = await http.post(
                f"{url}/flush_cache", headers=headers, params=wait_s
            )
    except httpx.TransportError as error:
        raise ServerError(f"no answer from {url}: {error!r}") from error
    if answer.is_error:
        raise ServerError(answer.text.strip(), answer.status_code)


class Comparison:
    """Runs one mix under several policies and keeps what was seen."""

    def __init__(
        self,
        client: TaperClient,
        mix: Mix,
        flush: Callable[[], Any],
        note: Callable[[str], None],
    ) -> None:
        self._client, self._mix = client, mix
        self._flush, self._note = flush, note
        self.runs: list[Run] = []

    async def measure_off(self) -> float:
        """Mean serial TPOT in ms under `off`: what the engine needs at least."""
        run = await self._run("off")
        self.runs.append(run)
        return mean_serial_tpot_ms(run.records)

    async def compare(self, slo: Slo, rounds: int) -> None:
        """Run what is missing for `rounds` interleaved rounds of every policy."""
        targets = {"ttft_slo_ms": slo.ttft_ms, "tpot_slo_ms": slo.planned_tpot_ms}
        await self._client.set_policy(**targets)
        todo = [policy for _ in range(rounds) for policy in POLICIES]
        for run in self.runs:
            todo.remove(run.policy)
        for policy in todo:
            self.runs.append(await self._run(policy))

    async def _run(self, policy: str) -> Run:
        await self._flush()
        await self._client.set_policy(policy=policy)
        async with step_log(self._client) as log:
            began_s = time.perf_counter()
            records = await run_mix(self._client, self._mix)
            duration_s = time.perf_counter() - began_s
        self._note(f"  {policy}: {duration_s:.1f} s")
        return Run(policy, records, log, duration_s)

    def facts(self, slo: Slo) -> dict[str, dict[str, Any]]:
        """Policy -> its facts over all rounds."""
        return {
            policy: policy_facts([r for r in self.runs if r.policy == policy], slo)
            for policy in POLICIES
        }


def policy_facts(runs: Sequence[Run], slo: Slo) -> dict[str, Any]:
    """The runs of one policy as one."""
    records = [record for run in runs for record in run.records]
    duration_s = sum(run.duration_s for run in runs)
    return {
        "policy": runs[0].policy,
        "num_rounds": len(runs),
        **score(records, slo, duration_s),
        **step_facts([run.log for run in runs]),
        "requests": [describe(record, slo) for record in records],
    }


def verdict(policies: Mapping[str, Mapping[str, Any]]) -> str:
    """What the table shows about the serial requests, in one sentence."""
    eager, taper = (_serial(policies[name]) for name in ("eager", "taper"))
    if eager.is_kept and taper.is_kept:
        return (
            "No contention at this load: eager and taper both kept the SLO for the "
            f"serial requests (eager {eager}, taper {taper})."
        )
    if taper.is_kept:
        return (
            f"eager missed the SLO of serial requests (kept it for {eager}); "
            f"taper kept it (for {taper})."
        )
    return (
        f"taper did not keep the SLO of serial requests in this run ({taper}; "
        f"eager {eager}): the machine was slower than while off was measured, or the "
        "SLO is too tight for it."
    )


@dataclass(frozen=True)
class _Kept:
    num_good: int
    num_sent: int

    @property
    def is_kept(self) -> bool:
        return self.num_good >= KEPT_ATTAINMENT * self.num_sent

    def __str__(self) -> str:
        return f"{self.num_good} of {self.num_sent}"


def _serial(facts: Mapping[str, Any]) -> _Kept:
    return _Kept(facts["num_serial_good"], facts["num_serial"])
