"""Policies and front ends of other distributions, found by entry point.

    [project.entry-points."sglang_taper.policies"]
    small-batch = "my_package:SmallBatchPolicy"

    [project.entry-points."sglang_taper.front_ends"]
    two-views = "my_package:TwoViews"

What an entry point names is called without arguments for a new policy or front end.
One that is not what it must be ends the start: it may be asked for at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sglang_taper.errors import ExtensionError
from sglang_taper.front_ends.registry import register_front_end
from sglang_taper.front_ends.types import Prompt
from sglang_taper.policy.admission import register_policy
from sglang_taper.policy.types import (
    AdmissionPlan,
    LatencyCoefficients,
    PolicyParams,
    RequestView,
    StepView,
)

POLICIES = "sglang_taper.policies"
FRONT_ENDS = "sglang_taper.front_ends"
_loaded: set[tuple[str, str, str]] = set()


def load_extensions() -> None:
    """Register what is installed, once per process.

    Raises ExtensionError naming entry point and distribution: it can not be imported,
    its name is taken or not allowed, or it does not keep the protocol.
    """
    _load(POLICIES, register_policy, _check_policy)
    _load(FRONT_ENDS, register_front_end, _check_front_end)


def _load(
    group: str,
    register: Callable[[str, Callable[[], Any]], None],
    check: Callable[[Any], None],
) -> None:
    for point in sorted(entry_points(group=group)):
        key = (group, point.name, point.value)
        if key in _loaded:
            continue
        try:
            factory = point.load()
            check(factory())
            register(point.name, factory)
        except Exception as error:  # whatever the code of somebody else raises
            raise ExtensionError(_complaint(point, error)) from error
        _loaded.add(key)


def _complaint(point: EntryPoint, error: Exception) -> str:
    owner = f" of {point.dist.name}" if point.dist else ""
    reason = str(error) or repr(error)
    return (
        f"entry point {point.name} = {point.value}{owner} in {point.group}: "
        f"{type(error).__name__}: {reason}"
    )


def _check_policy(policy: Any) -> None:
    """It must plan a step of one request with two branches, one of which must run."""
    plan = policy.plan(_smallest_step())
    if not isinstance(plan, AdmissionPlan):
        raise TypeError(f"plan() must return an AdmissionPlan, not {plan!r}")
    if plan.rows not in ([0], [0, 1]):
        raise ValueError(f"rows [0] or [0, 1] of a step were expected, not {plan.rows}")


def _smallest_step() -> StepView:
    request = RequestView("g", 0.0, 0.0, 0.0, 0.0, 2, 8, 1000.0, 50.0)
    return StepView(
        step=1,
        now_ms=10.0,
        requests=[request],
        request_of_row=[0, 0],
        branch=[0, 1],
        context_tokens=[8, 8],
        shared_tokens=[4, 4],
        output_tokens=[1, 1],
        remaining_tokens=[4, 4],
        last_run_step=[0, 0],
        must_run=[0],
        params=PolicyParams(),
        model=LatencyCoefficients(10.0, 1.0, 0.0, trusted=True),
    )


def _check_front_end(front_end: Any) -> None:
    """`run` must make a generator; nothing of it is run here."""
    program = front_end.run(Prompt(""))
    if not all(hasattr(program, name) for name in ("send", "close", "__next__")):
        raise TypeError(f"run() must be a generator, not return {program!r}")
