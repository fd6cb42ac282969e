"""`sglang-taper explain ID`: what happened to one request, as a chart or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from sglang_taper.errors import NoAnswer

BASE_URL = "http://127.0.0.1:30000"
# Where other clients of SGLang and OpenAI routes look for a key.
KEY_VARIABLES = ("OPENAI_API_KEY", "API_KEY")
TIMEOUT_S = 30.0
MIN_CHART, MAX_CHART, LABEL = 20, 120, 14

MARKS = {
    "queued": ".",
    "prefill": "P",
    "running": "=",
    "deferred": "#",
    "away": "-",
    "forgotten": "?",
}
REASONS = {
    "budget": "the step's time budget was used up",
    "cap": "its request runs as many branches as the cap allows",
    "baseline": "the policy runs one branch of each request",
    "triage": "its request is paused, so that others can still be in time",
    "fallback": "the latency model is not trusted",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", metavar="ID", help="a group, or the request id of a branch"
    )
    parser.add_argument(
        "--base-url", metavar="URL", default=BASE_URL, help=f"default {BASE_URL}"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the server's admin key, or its API key where it has no admin key; "
        f"default: the environment's {' or '.join(KEY_VARIABLES)}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_explain(args: argparse.Namespace) -> int:
    """Print the timeline; 0, or 1 for an id that the server does not know.

    Raises NoAnswer when there is no server of ours, or it refuses.
    """
    key = args.api_key or next(filter(None, map(os.getenv, KEY_VARIABLES)), None)
    told = fetch(args.base_url, args.id, key)
    if told is None:
        sys.stderr.write(
            f"sglang-taper: {args.base_url} knows no request or branch {args.id!r}: "
            "it never came, or it has ended and was forgotten since\n"
        )
        return 1
    if args.json:
        print(json.dumps(told, indent=1))
        return 0
    columns = shutil.get_terminal_size().columns
    for part in told.get("dp_ranks", [told]):
        print("\n".join(text_of(part, columns)))
    return 0


def fetch(base_url: str, id: str, key: str | None) -> dict[str, Any] | None:
    """`GET /taper/requests/{id}`; None for an unknown id. Raises NoAnswer."""
    import httpx

    url = f"{base_url.rstrip('/')}/taper/requests/{quote(id, safe='')}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(url, headers=headers, timeout=TIMEOUT_S)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoAnswer(f"{url}: {error or type(error).__name__}") from None
    if answer.status_code == 404 and "error" in body:
        return None
    if answer.status_code != 200:
        hint = "; it wants a key: --api-key" if answer.status_code == 401 else ""
        raise NoAnswer(f"{url} answers {answer.status_code}{hint}")
    if "branches" not in body and "dp_ranks" not in body:
        raise NoAnswer(f"{url} answers with something else")
    return dict(body)


# -- as text


def text_of(told: Mapping[str, Any], columns: int) -> Iterator[str]:
    """Lines: a summary, the chart, the forks, then every branch with its spans."""
    branches = told["branches"]
    yield _summary(told["request"], len(branches))
    yield ""
    yield from chart(branches, columns)
    for fork in told["forks"]:
        yield _fork_line(fork)
    for branch in branches:
        yield ""
        yield from _branch_lines(branch)


def _summary(request: Mapping[str, Any], num_branches: int) -> str:
    what = f"request {request['id']}: {num_branches} branches"
    ttft = f"TTFT {ms(request['ttft_ms'])} of {ms(request['ttft_slo_ms'])}"
    tpot = f"TPOT {ms(request['tpot_ms'])} of {ms(request['tpot_slo_ms'])}"
    late = f"{request['deadline_misses']} tokens late"
    tokens = f"{request['num_tokens']} tokens"
    return f"{what}, {tokens}; {ttft}, {tpot}; {late}"


def chart(branches: Sequence[Mapping[str, Any]], columns: int) -> Iterator[str]:
    """A line per branch; a character is the status that took most of its time."""
    width = max(MIN_CHART, min(MAX_CHART, columns - LABEL - 1))
    end_ms = max((s["to_ms"] for b in branches for s in b["spans"]), default=0.0)
    end_ms = max(end_ms, 1e-3)
    right = ms(end_ms)
    yield " " * LABEL + "0" + right.rjust(width - 1)
    for branch in branches:
        yield f"{label(branch):{LABEL}.{LABEL}}" + bar(branch["spans"], end_ms, width)
    legend = "  ".join(f"{mark} {status}" for status, mark in MARKS.items())
    yield " " * LABEL + legend
    yield ""


def label(branch: Mapping[str, Any]) -> str:
    name = f"{branch['branch'] + 1}/{branch['width']}" if branch["width"] > 1 else "-"
    return "  " * min(4, branch["depth"]) + name


def bar(spans: Sequence[Mapping[str, Any]], end_ms: float, width: int) -> str:
    """`spans` from 0 to `end_ms` as `width` characters."""
    slot_ms = end_ms / width
    return "".join(
        _mark_at(spans, slot * slot_ms, (slot + 1) * slot_ms) for slot in range(width)
    ).rstrip()


def _mark_at(spans: Sequence[Mapping[str, Any]], from_ms: float, to_ms: float) -> str:
    longest_ms, found = 0.0, " "
    for span in spans:
        overlap_ms = min(to_ms, span["to_ms"]) - max(from_ms, span["from_ms"])
        if overlap_ms > longest_ms:
            longest_ms, found = overlap_ms, MARKS[span["status"]]
    return found


def _fork_line(fork: Mapping[str, Any]) -> str:
    over = f"over at {ms(fork['ended_ms'])}"
    if fork["ended_ms"] is None:
        over = f"{fork['num_ended']} have ended"
    line = f"fork of {fork['width']} at {ms(fork['opened_ms'])}, {over}"
    if fork["joined_by"]:
        line += f", joined by {fork['joined_by']} at {ms(fork['joined_ms'])}"
    return line


def _branch_lines(branch: Mapping[str, Any]) -> Iterator[str]:
    end = f" ({branch['finish']})" if branch["finish"] else ""
    yield (
        f"{label(branch).strip()} {branch['rid']}: {branch['status']}{end}, "
        f"{branch['output_tokens']} tokens, ran in {branch['steps_run']} steps, "
        f"left out of {branch['steps_deferred']}"
    )
    if branch["num_spans_forgotten"]:
        yield f"  {branch['num_spans_forgotten']} earlier spans are forgotten"
    for span in branch["spans"]:
        for_ms = span["to_ms"] - span["from_ms"]
        line = f"  {ms(span['from_ms']):>10} {ms(for_ms):>10}  {_steps(span):13}"
        yield f"{line} {span['status']:8}  {why(span)}".rstrip()


def _steps(span: Mapping[str, Any]) -> str:
    if "from_step" not in span:
        return ""
    last = "" if span["to_step"] is None else span["to_step"]
    return f"{span['from_step']}-{last}"


def why(span: Mapping[str, Any]) -> str:
    """The binding constraint and who was most urgent; empty where nothing was bound."""
    reason = span.get("reason")
    if not reason:
        return ""
    text = REASONS.get(reason, reason)
    if span["budget_ms"] is not None:
        text += f" ({ms(span['budget_ms'])})"
    if span["urgent"]:
        text += f"; most urgent {span['urgent']}, slack {ms(span['urgent_slack_ms'])}"
    return text


def ms(value: float | None) -> str:
    """Milliseconds, or seconds where they are many."""
    if value is None:
        return "-"
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms"
