"""Request shapes from a file of real fork trees.

One JSON object per line: `prompt_tokens` and `phases`, a list of `{"serial": n}` and
`{"fork": {"header": n, "branches": [phases, ...], "join": n}}`. `header` (the plan
before the branches) and `join` (the conclusion after them) are decoded one token
after the other.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from sglang_taper.errors import FieldError
from sglang_taper.workload.shape import Phase, RequestShape, make_shape


def read_trees(path: str, shorten: float = 1.0) -> list[RequestShape]:
    """The shapes in `path` (plain or gzipped), every count divided by `shorten`.

    Raises FieldError for a file that is not of this form.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        shapes = [_shape(row, shorten) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        accepted = f"a JSONL file of fork trees ({error})"
        raise FieldError("--fork-trees", path, accepted) from None
    if not shapes:
        raise FieldError("--fork-trees", path, "at least one tree")
    return shapes


def _shape(row: dict[str, Any], shorten: float) -> RequestShape:
    phases = _phases(row["phases"], shorten)
    if not phases or not isinstance(phases[0], int):
        phases.insert(0, 1)
    return make_shape(_tokens(row["prompt_tokens"], shorten), phases)


def _phases(rows: list[dict[str, Any]], shorten: float) -> list[Phase]:
    """Phases of a path; runs of serial text become one phase."""
    phases: list[Phase] = []
    for row in rows:
        if "serial" in row:
            _append_text(phases, row["serial"], shorten)
            continue
        fork = row["fork"]
        _append_text(phases, fork["header"], shorten)
        branches = [_phases(branch, shorten) or [1] for branch in fork["branches"]]
        if branches:
            phases.append(branches)
        _append_text(phases, fork["join"], shorten)
    return phases


def _append_text(phases: list[Phase], tokens: int, shorten: float) -> None:
    if tokens <= 0:
        return
    tokens = _tokens(tokens, shorten)
    if phases and isinstance(phases[-1], int):
        phases[-1] += tokens
    else:
        phases.append(tokens)


def _tokens(count: int, shorten: float) -> int:
    return max(1, round(count / shorten))
