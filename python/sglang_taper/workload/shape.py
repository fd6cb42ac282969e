"""The shape of a request: how many tokens, in which branches, one after the other.

A path is a tuple of phases. A phase is a number of tokens decoded one after the other,
or a fork: a tuple of paths that may decode at the same time. `(2, ((3,), (5,)), 2)`
is two tokens, two branches of three and five, and two more once both have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from sglang_taper.errors import FieldError

# Recursive, which the type checker cannot say: int | tuple[Path, ...].
Phase = Any
Path = tuple[Phase, ...]


class RequestShape(msgspec.Struct, frozen=True):
    """A request before it is sent: prompt and phases. Its first phase is a number, at
    least 1, because prefill gives the first token."""

    prompt_tokens: int
    phases: Path

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches."""
        return count_tokens(self.phases)

    @property
    def num_critical_tokens(self) -> int:
        """Tokens on the longest way through: decode steps if nothing is deferred."""
        return count_critical_tokens(self.phases)

    @property
    def is_decomposable(self) -> bool:
        return any(isinstance(phase, tuple) for phase in self.phases)


def make_shape(prompt_tokens: int, phases: Sequence[Any]) -> RequestShape:
    """A checked shape from nested sequences; raises FieldError.

    A fork of a single branch is a fork; an empty path or a number below 1 is refused.
    """
    path = _checked_path(phases)
    if not isinstance(path[0], int):
        raise FieldError("phases", phases, "a number of tokens first")
    if type(prompt_tokens) is not int or prompt_tokens < 1:
        raise FieldError("prompt_tokens", prompt_tokens, "an integer, at least 1")
    return RequestShape(prompt_tokens, path)


def _checked_path(phases: Any) -> Path:
    if not isinstance(phases, list | tuple) or not phases:
        raise FieldError("phases", phases, "a list of at least one phase")
    return tuple(_checked_phase(phase) for phase in phases)


def _checked_phase(phase: Any) -> Phase:
    if type(phase) is int and phase >= 1:
        return phase
    if isinstance(phase, list | tuple) and phase:
        return tuple(_checked_path(path) for path in phase)
    raise FieldError("phase", phase, "an integer, at least 1, or a list of branches")


def count_tokens(path: Path) -> int:
    return sum(
        phase if isinstance(phase, int) else sum(map(count_tokens, phase))
        for phase in path
    )


def count_critical_tokens(path: Path) -> int:
    return sum(
        phase if isinstance(phase, int) else max(map(count_critical_tokens, phase))
        for phase in path
    )


def step_widths(path: Path) -> list[int]:
    """Live branches in each decode step if nothing is ever deferred."""
    widths: list[int] = []
    for phase in path:
        if isinstance(phase, int):
            widths += [1] * phase
        else:
            branches = map(step_widths, phase)
            widths += map(sum, zip_longest(*branches, fillvalue=0))
    return widths


def forks(path: Path) -> Iterator[tuple[Path, ...]]:
    """Every fork of the request, nested ones included."""
    for phase in path:
        if isinstance(phase, tuple):
            yield phase
            for branch in phase:
                yield from forks(branch)


def depth(path: Path) -> int:
    """Nesting levels of forks; 0 without one."""
    return max(
        (1 + max(map(depth, phase)) for phase in path if isinstance(phase, tuple)),
        default=0,
    )


def describe(shapes: Iterable[RequestShape]) -> dict[str, float]:
    """What a workload is made of, for the header of a result.

    `pdr`: share of requests that fork. `pts`: share of the tokens of those that are in
    branches. `abf`: mean branches per fork. `parallel_duty`: share of their decode
    steps with more than one live branch, nothing deferred. `serial_token_share`: share
    of all tokens in requests that do not fork. `tokens_per_critical_token`: the most
    raw throughput can gain from width.
    """
    all_shapes = list(shapes)
    wide = [shape for shape in all_shapes if shape.is_decomposable]
    widths = [width for shape in wide for width in step_widths(shape.phases)]
    fans = [len(fork) for shape in wide for fork in forks(shape.phases)]
    tokens = sum(shape.num_tokens for shape in all_shapes)
    critical = sum(shape.num_critical_tokens for shape in all_shapes)
    wide_tokens = sum(shape.num_tokens for shape in wide)
    return {
        "num_requests": len(all_shapes),
        "prompt_tokens": sum(shape.prompt_tokens for shape in all_shapes),
        "output_tokens": tokens,
        "critical_tokens": critical,
        "pdr": _ratio(len(wide), len(all_shapes)),
        "pts": _ratio(sum(map(_branch_tokens, wide)), wide_tokens),
        "abf": _ratio(sum(fans), len(fans)),
        "parallel_duty": _ratio(sum(width > 1 for width in widths), len(widths)),
        "max_depth": max((depth(shape.phases) for shape in wide), default=0),
        "serial_token_share": _ratio(tokens - wide_tokens, tokens),
        "tokens_per_critical_token": _ratio(tokens, critical),
    }


def _branch_tokens(shape: RequestShape) -> int:
    branches = (
        branch for phase in shape.phases if isinstance(phase, tuple) for branch in phase
    )
    return sum(map(count_tokens, branches))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
