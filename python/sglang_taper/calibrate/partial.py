"""What has been measured so far, on disk: a run that ends early can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_taper.calibrate.fit import CellSteps
from sglang_taper.errors import FieldError


class PartialResults:
    """A file with one JSON object a line: what was measured on, then the cells."""

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        """Read `path`, or begin it. Raises FieldError if its subject is another."""
        self.path = path
        self.cells: list[CellSteps] = []
        header = _line({"subject": dict(subject)})
        if path.exists():
            self.cells = _read(path, header)
        # Written again: the last line may have been cut.
        path.write_bytes(header + b"".join(map(_line, self.cells)))

    def add(self, cell: CellSteps) -> None:
        self.cells.append(cell)
        with self.path.open("ab") as file:
            file.write(_line(cell))

    def remove(self) -> None:
        self.path.unlink()


def _read(path: Path, header: bytes) -> list[CellSteps]:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and lines[0] != header:
        accepted = (
            "results of this server and machine: remove the file, or choose another "
            "with --output"
        )
        raise FieldError("partial results", str(path), accepted)
    cells = []
    for line in lines[1:]:
        try:
            cells.append(msgspec.json.decode(line, type=CellSteps))
        except msgspec.DecodeError:
            break
    return cells


def _line(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted") + b"\n"
