"""States of the page that no small server reaches, made by hand."""

from __future__ import annotations

from random import Random
from typing import Any

STATUSES = ("running", "deferred", "prefill", "queued", "done", "aborted")
REASONS = ("budget", "cap", "baseline", "triage", "fallback", "of its own")
NOW_MS = 5_000_000.0


def synthetic_state(num_requests: int, width: int, seed: int = 0) -> dict[str, Any]:
    """As `GET /taper/live` answers. Each request has a root, a fork of `width`
    branches below it and a fork of two below the first of these."""
    random = Random(seed)
    return {
        "version": "0.0.0",
        "now_ms": NOW_MS,
        "step": 900,
        "params": {"policy": "taper", "tpot_slo_ms": 50.0, "rho": 0.3},
        "latency_model": {"trusted": True, "mape": 0.041},
        "service": {
            **{"window_s": 60.0, "num_requests_ended": 40, "num_requests_in_slo": 38},
            **{"slo_attainment": 0.95, "request_goodput": 0.63, "token_goodput": 512.0},
        },
        **{"num_live_groups": num_requests, "num_pins": 3, "pinned_tokens": 900},
        **{"num_running": 64, "num_waiting": 30, "max_rows": 64},
        "pool": {"free": 3000, "evictable": 2000, "protected": 3000, "total": 8000},
        "steps": _steps(random, 900),
        "requests": [_request(random, i, width) for i in range(num_requests)],
        "num_requests_left_out": 7,
        "deferrals": [_mark(i, reason) for i, reason in enumerate(REASONS)],
    }


def _steps(random: Random, num_steps: int) -> dict[str, list[Any]]:
    rows = [random.randint(40, 64) for _ in range(num_steps)]
    admitted = [random.randint(20, n) for n in rows]
    measured = [6 + 0.5 * n + random.random() for n in admitted]
    return {
        "step": list(range(1, num_steps + 1)),
        "now_ms": [NOW_MS - 60.0 * (num_steps - i) for i in range(num_steps)],
        "reason": ["budget"] * num_steps,
        "num_requests": [12] * num_steps,
        "num_rows": rows,
        "num_admitted": admitted,
        "predicted_ms": [ms * random.uniform(0.95, 1.05) for ms in measured],
        "measured_ms": [*measured[:-1], None],
        "baseline_ms": [12.0] * num_steps,
        "budget_ms": [34.0] * num_steps,
        "min_slack_ms": [random.uniform(-20, 90) for _ in range(num_steps)],
    }


def _mark(number: int, reason: str) -> dict[str, Any]:
    return {
        **{"step": 880 + number, "now_ms": NOW_MS - 90.0, "status": "deferred"},
        **{"reason": reason, "budget_ms": 34.0},
        **{"urgent": "request-3", "urgent_slack_ms": 12.5},
    }


def _request(random: Random, number: int, width: int) -> dict[str, Any]:
    name = f"request-{number}"
    rows = [(f"{name}/root", None, 0, 1, 0, "done")]
    rows += [
        (f"{name}/{i}", rows[0][0], i, width, 1, random.choice(STATUSES))
        for i in range(width)
    ]
    rows += [(f"{name}/0/{i}", f"{name}/0", i, 2, 2, "running") for i in range(2)]
    rid, parent, branch, of, depth, status = (list(c) for c in zip(*rows, strict=True))
    return {
        **{"id": name, "is_group": True, "age_ms": 1500.0 + number, "num_tokens": 90},
        **{"ttft_ms": 80.0, "tpot_ms": 61.0 if number % 3 == 0 else 31.0},
        **{"ttft_slo_ms": 2000.0, "tpot_slo_ms": 50.0, "deadline_misses": 0},
        "branches": {
            **{"rid": rid, "parent": parent, "branch": branch, "width": of},
            **{"depth": depth, "stage": depth, "status": status},
            **{"output_tokens": [9] * len(rows), "steps_run": [9] * len(rows)},
            "steps_deferred": [4] * len(rows),
            "deferral": [
                random.randrange(len(REASONS)) if s == "deferred" else None
                for s in status
            ],
        },
    }
