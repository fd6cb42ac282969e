"""The table of hooks as Markdown: `python -m sglang_taper.engine.hooks_doc`.

`docs/hooks.md` holds its output; a test fails when the two differ.
"""

from __future__ import annotations

from sglang_taper.engine.hooks import HOOKS, Hook

_COLUMNS = ("id", "target", "kind", "process", "policy `none`", "why", "removable when")


def markdown() -> str:
    """One row per hook, in the order of the table; ends with a newline."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, HOOKS)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cells(hook: Hook) -> tuple[str, ...]:
    return (
        f"`{hook.id}`",
        f"`{hook.target}`",
        hook.kind.value,
        hook.role.value,
        "present" if hook.always else "absent",
        hook.why,
        hook.removable_when,
    )


if __name__ == "__main__":
    print(markdown(), end="")
