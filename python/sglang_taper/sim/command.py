"""`sglang-taper simulate`: run, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from sglang_taper.errors import FieldError
from sglang_taper.sim.cases import run_exact_cases
from sglang_taper.sim.options import SimulateOptions
from sglang_taper.sim.sweep import run_sweep

NOTE = "Simulated, a projection: nothing here was measured on a machine."
FREE_PREFILLS = "Its profile says nothing of prefills, so these take no time."
_COLUMNS = (
    ("tok/s", "token_goodput", "{:.1f}"),
    ("attained", "slo_attainment", "{:.3f}"),
    ("critical", "slo_attainment_critical", "{:.3f}"),
    ("raw tok/s", "output_throughput", "{:.1f}"),
    ("rows", "mean_rows_admitted", "{:.1f}"),
    ("step ms", "mean_step_ms", "{:.1f}"),
    ("stalls", "stall_share", "{:.3f}"),
)


def run_command(args: argparse.Namespace) -> int:
    """Runs what the flags say. Side effects: prints; writes `--json`.

    Raises FieldError for a value that is not acceptable.
    """
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise FieldError("--json", args.json, "a file in a folder that exists")
    if args.exact_cases:
        facts: dict[str, Any] = {"cases": run_exact_cases()}
        print("\n".join(map(_case_line, facts["cases"])))
    else:
        options = SimulateOptions.from_args(args)
        results = list(run_sweep(options, args.output_details))
        note = NOTE if options.machine.prefill.costs else f"{NOTE} {FREE_PREFILLS}"
        facts = {"note": note, "source": options.machine.source, "results": results}
        print(f"{note}\n{format_results(results)}")
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _case_line(case: dict[str, Any]) -> str:
    return (
        f"{case['case']:8} {case['policy']:38} end {max(case['end_ms']):g} ms, "
        f"{case['num_steps']} steps, {sum(case['met'])} met, "
        f"{sum(case['met_critical'])} met on the critical path, "
        f"{case['good_tokens']} good tokens"
    )


def format_results(results: list[dict[str, Any]]) -> str:
    """Means over seeds as a text table, one block per SLO; `(low-high)` if several."""
    by_slo: dict[int, dict[str, list[dict[str, Any]]]] = {}
    seen: dict[Any, int] = {}
    for result in results:
        # SLOs made from factors differ a little from seed to seed: the n-th of each.
        key = (result["policy"], result["seed"])
        seen[key] = seen.get(key, -1) + 1
        block = by_slo.setdefault(seen[key], {})
        block.setdefault(result["policy"], []).append(result)
    return "\n\n".join(map(_format_block, by_slo.values()))


def _format_block(block: dict[str, list[dict[str, Any]]]) -> str:
    width = max(map(len, block))
    slos = [r["goodput_slos_ms"] for r in next(iter(block.values()))]
    ttft, tpot = slos[0]["ttft"], fmean(slo["tpot"] for slo in slos)
    head = "".join(f"{name:>11}" for name, _, _ in _COLUMNS)
    lines = [
        f"TTFT {ttft:g} ms, TPOT {tpot:.4g} ms",
        f"{'policy':{width}}{head}  vs off  vs eager",
    ]
    goodput = {
        policy: fmean(r["token_goodput"] for r in runs)
        for policy, runs in block.items()
    }
    for policy, runs in block.items():
        cells = [form.format(fmean(r[key] for r in runs)) for _, key, form in _COLUMNS]
        ratios = [_ratio(goodput, policy, base) for base in ("off", "eager")]
        line = f"{policy:{width}}" + "".join(f"{cell:>11}" for cell in cells)
        lines.append(f"{line}{ratios[0]:>8}{ratios[1]:>10}{_spread(runs)}")
    return "\n".join(lines)


def _ratio(goodput: dict[str, float], policy: str, base: str) -> str:
    if not goodput.get(base):
        return "-"
    return f"{goodput[policy] / goodput[base]:.2f}"


def _spread(runs: list[dict[str, Any]]) -> str:
    if len(runs) < 2:
        return ""
    values = [run["token_goodput"] for run in runs]
    return f"  ({min(values):.1f}-{max(values):.1f})"
