"""A tiny distribution with entry points, as pip leaves it; and the documented one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

DOC = Path(__file__).parents[1] / "docs" / "extending.md"
NAME = "taper-test-extension"


def write_distribution(
    folder: Path, files: Mapping[str, str], points: Mapping[str, Sequence[str]]
) -> None:
    """Modules by name and entry points by group, below `folder`."""
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source)
    info = folder / f"{NAME.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n"
    )
    lines = [f"[{group}]\n" + "\n".join(named) for group, named in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def documented() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Modules and entry points that docs/extending.md shows."""
    text = DOC.read_text()
    files = dict(re.findall(r"^`(\w+)\.py`:\n```python\n(.*?)^```$", text, re.M | re.S))
    (project,) = re.findall(r"^```toml\n(.*?)^```$", text, re.M | re.S)
    groups = tomllib.loads(project)["project"]["entry-points"]
    points = {
        group: [f"{name} = {value}" for name, value in named.items()]
        for group, named in groups.items()
    }
    return files, points
