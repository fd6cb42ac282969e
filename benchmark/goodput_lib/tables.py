"""Markdown tables of results: means over rounds, with the lowest and the highest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

Result = Mapping[str, Any]

_NUMBERS = (
    ("raw tok/s", "output_throughput", "{:.1f}"),
    ("TTFT p99 ms", "p99_ttft_ms", "{:.0f}"),
    ("TPOT mean ms", "mean_tpot_ms", "{:.1f}"),
    ("critical TPOT mean ms", "mean_tpot_critical_ms", "{:.1f}"),
    ("ITL p99 ms", "p99_itl_ms", "{:.0f}"),
)
HEADER = (
    *("policy", "goodput tok/s", "vs off", "vs eager", "attained", "critical path"),
    *("serial", "forking", "victims"),
    *(title for title, _, _ in _NUMBERS),
)


def markdown_tables(results: Sequence[Result]) -> str:
    """One table for each group of results with the same SLOs and rate."""
    parts = [
        f"{title}\n\n{_table(members)}" for title, members in grouped(results).items()
    ]
    rates = rate_table(results)
    return "\n\n".join([*parts, *([rates] if rates else [])])


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(_title(result), []).append(result)
    return groups


def _title(result: Result) -> str:
    slos = result["goodput_slos_ms"]
    text = ", ".join(f"{name.upper()} {ms:.4g} ms" for name, ms in slos.items())
    if result["tpot_slo_x"]:
        text += f" ({result['tpot_slo_x']:.3g} x off)"
    if result["request_rate"]:
        text += f", {result['request_rate']:.2f} requests/s"
    if result["test_switch"]:
        text += f", TEST SWITCH: {result['test_switch']}"
    return text


def by_policy(results: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result["policy"], []).append(result)
    return found


def _table(members: Sequence[Result]) -> str:
    policies = by_policy(members)
    means = {
        name: fmean(run["token_goodput"] for run in runs)
        for name, runs in policies.items()
    }
    rows = [_row(name, runs, means) for name, runs in policies.items()]
    return as_markdown(HEADER, rows) + _contest(policies.get("eager", ()))


def _contest(eager: Sequence[Result]) -> str:
    """Whether width can matter at this SLO: eager's rows are slower than it."""
    tpots = [run["goodput_slos_ms"].get("tpot") for run in eager]
    if not tpots or tpots[0] is None:
        return ""
    itl_ms = fmean(run["mean_itl_ms"] for run in eager)
    verdict = "Contested" if itl_ms > tpots[0] else "Not contested"
    return f"\n\n{verdict}: under `eager` a row gets a token every {itl_ms:.4g} ms."


def _row(name: str, runs: Sequence[Result], means: Mapping[str, float]) -> list[str]:
    return [
        f"`{name}`",
        _spread(runs, "token_goodput", "{:.1f}"),
        *(_times(means[name], means.get(base)) for base in ("off", "eager")),
        _spread(runs, "slo_attainment", "{:.0%}"),
        *(
            _mean(runs, key, "{:.0%}")
            for key in (
                "slo_attainment_critical",
                "serial_slo_attainment",
                "decomposable_slo_attainment",
                "victim_slo_attainment",
            )
        ),
        *(_mean(runs, key, form) for _, key, form in _NUMBERS),
    ]


def _times(value: float, base: float | None) -> str:
    return f"{value / base:.2f}" if base else "-"


def _known(runs: Sequence[Result], key: str) -> list[float]:
    return [run[key] for run in runs if run[key] is not None]


def _mean(runs: Sequence[Result], key: str, form: str) -> str:
    values = _known(runs, key)
    return form.format(fmean(values)) if values else "-"


def _spread(runs: Sequence[Result], key: str, form: str) -> str:
    values = _known(runs, key)
    if len(values) < 2:
        return _mean(runs, key, form)
    low, high = form.format(min(values)), form.format(max(values))
    return f"{_mean(runs, key, form)} ({low}-{high})"


def as_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- rates


def rates_attained(results: Iterable[Result]) -> dict[str, dict[str, list[float]]]:
    """SLO -> policy -> `rate_at_attainment` of each round, as of its last rate.

    A round in which no rate was attained counts as 0.
    """
    last: dict[tuple[str, str, int], float] = {}
    for result in results:
        if result["request_rate"] is not None:
            slos = result["goodput_slos_ms"]
            slo = ", ".join(f"{name.upper()} {ms:.4g} ms" for name, ms in slos.items())
            key = (slo, result["policy"], result["round"])
            last[key] = result["rate_at_attainment"] or 0.0
    found: dict[str, dict[str, list[float]]] = {}
    for (slo, policy, _), rate in last.items():
        found.setdefault(slo, {}).setdefault(policy, []).append(rate)
    return found


def rate_table(results: Sequence[Result]) -> str:
    """Rates at the wanted attainment; empty without an open loop."""
    lines = [
        [slo, f"`{policy}`", f"{fmean(rates):.2f}", _low_high(rates)]
        for slo, policies in rates_attained(results).items()
        for policy, rates in policies.items()
    ]
    if not lines:
        return ""
    header = ("SLO", "policy", "rate at attainment, requests/s", "lowest-highest")
    return as_markdown(header, lines)


def _low_high(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


# -- what ran


def provenance(results: Sequence[Result]) -> str:
    """One line on workload, server and machine; several if results differ in it."""
    return "\n".join(dict.fromkeys(map(_provenance_line, results)))


def _provenance_line(result: Result) -> str:
    workload, server, machine = (
        result[name] for name in ("workload", "server", "machine")
    )
    facts = (
        Path(server["arguments"]["model_path"]).name,
        f"{server['weights']} weights",
        f"SGLang {server['sglang']}",
        f"{machine['cpus']} CPUs",
        _share("PDR", workload["pdr"]),
        _share("PTS", workload["pts"]),
        f"ABF {workload['abf']:.1f}",
        _share("parallel duty", workload["parallel_duty"]),
        f"{workload['num_requests']} requests of seed {workload['seed']}",
        f"{workload['output_tokens']} tokens out",
        _share("clipped", workload["share_clipped"]),
    )
    return "- " + ", ".join(facts)


def _share(name: str, value: float) -> str:
    return f"{name} {value:.2f}"
