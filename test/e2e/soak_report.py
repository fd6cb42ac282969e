"""What a soak has done and what it has left: memory of processes, zombies, a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

REPORT = Path(
    os.environ.get("TAPER_SOAK_REPORT")
    or Path(tempfile.gettempdir()) / "sglang-taper-soak.json"
)
WARM_UP_SHARE = 0.4
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


def processes_of(session: int) -> Iterator[tuple[int, str, str]]:
    """(pid, name, state) of every process of a session; SGLang's names have blanks."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            head, _, tail = (entry / "stat").read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, owner = tail.split()[:4]
        if int(owner) == session:
            yield int(entry.name), head.partition("(")[2], state


def zombies_of(session: int) -> list[str]:
    return [
        f"{pid} {name}" for pid, name, state in processes_of(session) if state == "Z"
    ]


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB


class Memory:
    """Resident memory of each process of a session, sampled while it is idle."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.names = {pid: name for pid, name, _ in processes_of(session)}
        self.samples: dict[int, list[float]] = {pid: [] for pid in self.names}

    def sample(self) -> None:
        """A process that came or went is an error: none should."""
        found = {pid for pid, _, state in processes_of(self.session) if state != "Z"}
        assert found == set(self.names), (found, self.names)
        for pid, sizes in self.samples.items():
            sizes.append(resident_mb(pid))

    def growth(self) -> list[dict[str, Any]]:
        """By process: MB after the warm-up and at the end, and what that is more."""
        return [
            {"process": self.names[pid], "start_mb": round(sizes[0], 1), **grown(sizes)}
            for pid, sizes in self.samples.items()
        ]


def grown(sizes: Sequence[float]) -> dict[str, float]:
    """Medians of the tenth of the samples after the warm-up and of the last tenth."""
    first = int(WARM_UP_SHARE * len(sizes))
    width = max(1, (len(sizes) - first) // 10)
    warm, end = median(sizes[first : first + width]), median(sizes[-width:])
    return {
        "warm_mb": round(warm, 1),
        "end_mb": round(end, 1),
        "growth": round(end / warm - 1, 4),
    }


def write(report: dict[str, Any]) -> None:
    """To `TAPER_SOAK_REPORT`, else to the folder for temporary files."""
    REPORT.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"soak report: {REPORT}")


def total(counters: Sequence[Counter[str]]) -> dict[str, int]:
    """By name, summed over clients."""
    summed: Counter[str] = Counter()
    for counter in counters:
        summed.update(counter)
    return dict(sorted(summed.items()))
