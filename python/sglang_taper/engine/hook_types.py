"""What a row of the table of hooks is (`hooks.py`)."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    """Which process a hook belongs to."""

    MAIN = "main"  # parses flags, launches the others
    TOKENIZER = "tokenizer"  # main, or each uvicorn worker
    SCHEDULER = "scheduler"  # one per rank


class Kind(StrEnum):
    """How a hook is put in place. OVERRIDE rows belong to a replaced class."""

    REPLACE = "replace"
    BEFORE = "before"
    AROUND = "around"
    AFTER = "after"
    OVERRIDE = "override"
    ASSIGN = "assign"
    RELIED_ON = "relied on"  # not touched; its behaviour is assumed


class Hook(msgspec.Struct, frozen=True):
    """One row.

    `function` is `module:attribute` inside this package; None for OVERRIDE and
    RELIED_ON rows, which are here to be fingerprinted. `always` rows exist with
    policy `none` too.
    """

    id: str
    target: str
    kind: Kind
    role: Role
    function: str | None
    why: str
    removable_when: str
    always: bool = False


def relied_on(id: str, target: str, role: Role, why: str, removable_when: str) -> Hook:
    """A row for a function whose behaviour is assumed and that is not touched."""
    return Hook(id, target, Kind.RELIED_ON, role, None, why, removable_when)


def overridden(id: str, target: str, role: Role, why: str, removable_when: str) -> Hook:
    """A row for a method that our subclass of a replaced class overrides."""
    return Hook(id, target, Kind.OVERRIDE, role, None, why, removable_when)
