"""Front ends by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from sglang_taper.errors import FieldError
from sglang_taper.front_ends.skeleton import SkeletonOfThought
from sglang_taper.front_ends.threadweaver import ThreadWeaver
from sglang_taper.front_ends.types import FrontEnd

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_factories: dict[str, Callable[[], FrontEnd]] = {}


def register_front_end(name: str, factory: Callable[[], FrontEnd]) -> None:
    """Make `factory` available as front end `name`.

    Raises FieldError for a name that is not `[a-z][a-z0-9_-]*` or is taken by
    another factory.
    """
    if not _NAME.fullmatch(name):
        raise FieldError("front_end", name, _NAME.pattern)
    if _factories.setdefault(name, factory) is not factory:
        raise FieldError("front_end", name, "a name that is not registered yet")


def make_front_end(name: object, field: str = "front_end") -> FrontEnd:
    """A new front end; raises FieldError naming `field` and listing the known names.

    `name` is whatever a client sent.
    """
    if not isinstance(name, str) or name not in _factories:
        raise FieldError(field, name, "one of " + ", ".join(front_end_names()))
    return _factories[name]()


def front_end_names() -> tuple[str, ...]:
    return tuple(sorted(_factories))


register_front_end("threadweaver", ThreadWeaver)
register_front_end("skeleton-of-thought", SkeletonOfThought)
