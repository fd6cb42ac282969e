"""One JSON object per policy, round and SLO: what ran, how, and what came out."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from goodput_lib.load import (
    Played,
    counted,
    outcomes_of,
)
from goodput_lib.options import Options
from goodput_lib.policies import Contender
from sglang_taper.demo.steps import StepLog, step_facts
from sglang_taper.policy.latency_fit import fit_prefill
from sglang_taper.workload.requests import (
    PlannedRequest,
    WorkloadSpec,
    workload_header,
)
from sglang_taper.workload.score import (
    mean_or_none,
    mean_time_between_tokens_ms,
    percentile,
    score,
)

if TYPE_CHECKING:
    from goodput_lib.rounds import Yardstick

MAX_SHOWN_ERRORS = 3
_STATISTICS = ("mean", "median", "p90", "p95", "p99")
MAX_STEP_PAIRS = 400


class Run(msgspec.Struct, frozen=True):
    """One policy over one list of requests; scored once or at several SLOs."""

    id: str
    contender: Contender
    round: int
    rate: float | None
    spec: WorkloadSpec
    requests: list[PlannedRequest]
    share_clipped: float
    share_dropped: float
    planned_slos_ms: dict[str, float]
    played: Played
    log: StepLog | None
    planner_p99_ms: float | None
    server: dict[str, Any]

    @property
    def summary(self) -> str:
        played = self.played
        spent_s = (played.ended_ms - played.began_ms) / 1000
        tokens = sum(seen.num_tokens for seen in played.seen)
        failed = sum(seen.error is not None for seen in played.seen)
        return f"{len(played.seen)} requests, {tokens} tokens in {spent_s:.0f} s" + (
            f", {failed} FAILED" if failed else ""
        )


def result_of(
    run: Run, slos_ms: Mapping[str, float], options: Options, yardstick: Yardstick
) -> dict[str, Any]:
    """SGLang's keys, `workload/score.py`'s, and what the engine and the client say."""
    args = options.args
    ones, duration_s = counted(run.played)
    outcomes = outcomes_of(ones, run.played.seen)
    scored = score(outcomes, slos_ms, duration_s)
    result = {
        "policy": run.contender.label,
        "run": run.id,
        "round": run.round,
        "tag": args.tag,
        "preset": args.preset,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()),
        "params": run.contender.changes,
        "planned_slos_ms": None if run.contender.is_slo_blind else run.planned_slos_ms,
        "tpot_slo_x": _ratio(slos_ms.get("tpot"), yardstick.off_ms),
        "off_ms_between_tokens": yardstick.off_ms,
        "request_rate": run.rate,
        "rate_at_attainment": None,
        **scored,
        **{name: _of_metric(scored, name) for name in ("tpot", "tpot_critical")},
        **_itls(run.played),
        **_width(run.played),
        "mean_time_between_tokens_ms": mean_time_between_tokens_ms(
            seen.outcome() for seen in run.played.seen
        ),
        **_failures(run.played),
        **_client(run.played),
        "engine": _engine(run, args.output_details),
        "workload": _header(run, options),
        "server": run.server,
        "test_switch": _test_switch(run.server),
        "machine": machine_facts(),
    }
    if args.output_details:
        result["requests"] = msgspec.to_builtins(outcomes)
    return result


def _of_metric(scored: Mapping[str, Any], name: str) -> dict[str, float | None]:
    return {stat: scored[f"{stat}_{name}_ms"] for stat in _STATISTICS}


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part and whole else None


def _itls(played: Played) -> dict[str, Any]:
    """Gaps between two tokens of one row, over all rows."""
    gaps_ms = sorted(gap for seen in played.seen for gap in seen.gaps_ms)
    return {
        "mean_itl_ms": mean_or_none(gaps_ms),
        "median_itl_ms": percentile(gaps_ms, 50),
        "p95_itl_ms": percentile(gaps_ms, 95),
        "p99_itl_ms": percentile(gaps_ms, 99),
        "max_itl_ms": percentile(gaps_ms, 100),
    }


def _width(played: Played) -> dict[str, int]:
    """What the branches of forking requests were told when they ended."""
    return {
        "branch_steps_run": sum(seen.num_steps_run for seen in played.seen),
        "branch_steps_deferred": sum(seen.num_steps_deferred for seen in played.seen),
    }


def _failures(played: Played) -> dict[str, Any]:
    errors = Counter(seen.error for seen in played.seen if seen.error)
    return {
        "num_errors": errors.total(),
        "errors": [text for text, _ in errors.most_common(MAX_SHOWN_ERRORS)],
    }


def _client(played: Played) -> dict[str, float | None]:
    """Whether the client itself was slow: late timers, and its share of a core."""
    return {
        "client_p99_lag_ms": played.p99_lag_ms,
        "client_cpu_share": played.client_cpu_share,
    }


def _engine(run: Run, with_details: bool) -> dict[str, Any] | None:
    if run.log is None:
        return None
    facts = step_facts([run.log])
    facts["planner_p99_ms"] = run.planner_p99_ms
    facts["prefill_ms"] = fit_prefill(run.log.prefills)
    steps = max(1, facts["num_steps"])
    facts["mean_rows_admitted"] = facts["num_rows_admitted"] / steps
    facts["mean_rows_deferred"] = facts["num_rows_deferred"] / steps
    if with_details:
        facts["step_pairs_ms"] = step_pairs_ms(run.log)
    return facts


def step_pairs_ms(log: StepLog) -> list[tuple[float, float]]:
    """(predicted, measured) of at most 400 steps, evenly taken."""
    pairs = [
        (step["predicted_ms"], step["measured_ms"])
        for step in log.steps
        if step["predicted_ms"] and step["measured_ms"]
    ]
    return pairs[:: max(1, len(pairs) // MAX_STEP_PAIRS)][:MAX_STEP_PAIRS]


def _header(run: Run, options: Options) -> dict[str, Any]:
    low, high = options.clip_prompt
    header = workload_header(run.spec, run.requests)
    if options.programs:
        header["parameters"] = None
    return {
        **header,
        "programs": options.programs or None,
        "prompts": "text of programs" if options.programs else "random token ids",
        "prompt_limits": [low, high],
        "share_clipped": run.share_clipped,
        "share_dropped": run.share_dropped,
        "branch_own_tokens": options.manner.branch_own_tokens,
        "temperature": options.manner.temperature,
        "lengths": "exact, end-of-sequence ignored",
    }


def _test_switch(server: Mapping[str, Any]) -> str | None:
    added_ms = server.get("test_step_cost_ms") or 0.0
    return f"{added_ms:g} ms added to every decode step" if added_ms else None


def machine_facts() -> dict[str, Any]:
    """What ran this, without its name. `load_average`: of the last minute."""
    return {
        "processor": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def achieved(history: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """The highest rate up to which attainment stayed at `wanted`; None below all.

    `history`: ascending (rate, attainment). Between two rates it is interpolated.
    """
    best: float | None = None
    before: tuple[float, float] | None = None
    for rate, attainment in history:
        if attainment < wanted:
            if before is not None and before[1] > attainment:
                share = (before[1] - wanted) / (before[1] - attainment)
                best = before[0] + share * (rate - before[0])
            break
        best, before = rate, (rate, attainment)
    return best


def append_result(path: str, result: Mapping[str, Any]) -> None:
    """Add one line to a JSONL file, at once."""
    with Path(path).open("ab") as file:
        file.write(orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
