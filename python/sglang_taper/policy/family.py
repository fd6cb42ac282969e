"""Who descends from whom, as the branches of one request name their parents."""

from __future__ import annotations

from collections.abc import Mapping


def subtree(root: str, parents: Mapping[str, str | None]) -> set[str]:
    """The request id `root` and all request ids below it.

    `parents` maps a request id to the one it names as its parent. `root` is in the
    result whether or not it is a key. A cycle, which only a client can make, ends
    where it began.
    """
    children: dict[str, list[str]] = {}
    for rid, parent in parents.items():
        if parent is not None:
            children.setdefault(parent, []).append(rid)
    found = {root}
    unvisited = [root]
    while unvisited:
        new = set(children.get(unvisited.pop(), ())) - found
        found |= new
        unvisited.extend(new)
    return found
