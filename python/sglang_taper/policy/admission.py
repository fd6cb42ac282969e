"""Which branches decode in this step: the policy protocol, its registry, and TAPER."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from sglang_taper.errors import FieldError
from sglang_taper.policy.baselines import (
    CapPolicy,
    EagerPolicy,
    OffPolicy,
    choose_baseline,
)
from sglang_taper.policy.filling import Budget, plan_within, step_kv_tokens
from sglang_taper.policy.ledger import LedgerPolicy
from sglang_taper.policy.slack import SCHEDULE, published_slack, step_slack
from sglang_taper.policy.triage import TriagePolicy
from sglang_taper.policy.types import AdmissionPlan, StepView

__all__ = [
    "AdmissionPolicy",
    "LedgerPolicy",
    "TaperPolicy",
    "choose_baseline",
    "make_policy",
    "policy_names",
    "register_policy",
    "step_kv_tokens",
]

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
# `none` on the command line means that no policy is installed at all.
_RESERVED = "none"


class AdmissionPolicy(Protocol):
    """Chooses the rows of a decode step.

    `plan` must be a function of its argument alone: no clock, no randomness, no
    state, so that all tensor-parallel ranks agree. It answers with every `must_run`
    row and at least one row of every request (`triage` may pause a request).
    """

    def plan(self, step: StepView) -> AdmissionPlan: ...


_factories: dict[str, Callable[[], AdmissionPolicy]] = {}


def register_policy(name: str, factory: Callable[[], AdmissionPolicy]) -> None:
    """Make `factory` available as policy `name`.

    Raises FieldError for a name that is not `[a-z][a-z0-9_-]*`, is `none`, or is
    taken by another factory.
    """
    if not _NAME.fullmatch(name) or name == _RESERVED:
        raise FieldError("policy", name, f"[a-z][a-z0-9_-]* other than {_RESERVED}")
    if _factories.setdefault(name, factory) is not factory:
        raise FieldError("policy", name, "a name that is not registered yet")


def make_policy(name: str) -> AdmissionPolicy:
    """A new policy object; raises FieldError listing the known names."""
    if name not in _factories:
        raise FieldError("policy", name, "one of " + ", ".join(policy_names()))
    return _factories[name]()


def policy_names() -> tuple[str, ...]:
    return tuple(sorted(_factories))


class TaperPolicy:
    """Fill the step with extra branches while it fits the slack budget (TAPER).

    Budget: `max(T0, (1 - stall_share) * max(T0 + rho * max(0, slack - T0), pace))`
    with T0 the predicted S0, `slack` (less its reserve) and the TPOT of who has it
    from `step_slack`. `pace` is for `schedule` deadlines, `min(slack, (1 - error) *
    TPOT)` with the model's error: a step of that length uses up nothing that was saved,
    so rho has nothing to ration. Extra rows come in the order of marginal utility per
    predicted marginal millisecond, ties longest waiting first, up to the first one that
    does not fit. Replanned from scratch at every step. Raises FieldError for an unknown
    `params.utility`.
    """

    def plan(self, step: StepView) -> AdmissionPlan:
        return plan_within(step, _slack_budget)


def _slack_budget(step: StepView, baseline_ms: float) -> Budget:
    urgent = step_slack(step, baseline_ms)
    if urgent is None:
        return Budget(None, None)
    free_ms = urgent.slack_ms - urgent.reserve_ms
    wanted_ms = baseline_ms + step.params.slack_fraction * max(0, free_ms - baseline_ms)
    if step.params.deadline == SCHEDULE:
        pace_ms = (1 - step.model.error) * urgent.tpot_slo_ms
        wanted_ms = max(wanted_ms, min(free_ms, pace_ms))
    return Budget(max(baseline_ms, (1 - step.stall_share) * wanted_ms), urgent.slack_ms)


class PublishedTaperPolicy:
    """TAPER to the letter: `TaperPolicy` without what we added.

    Every request is protected, lost ones too; prefills are not paid for in advance
    (budget `T0 + rho * max(0, slack - T0)`); equal rows come in batch order. A baseline
    to compare with, best with `deadline` `progress`.
    """

    def plan(self, step: StepView) -> AdmissionPlan:
        return plan_within(step, _published_budget, batch_order)


def batch_order(step: StepView) -> list[int]:
    return list(range(step.num_rows))


def _published_budget(step: StepView, baseline_ms: float) -> Budget:
    slack_ms = published_slack(step)
    spare_ms = max(0.0, slack_ms - baseline_ms)
    return Budget(baseline_ms + step.params.slack_fraction * spare_ms, slack_ms)


register_policy("off", OffPolicy)
register_policy("eager", EagerPolicy)
register_policy("cap", CapPolicy)
register_policy("taper", TaperPolicy)
register_policy("ledger", LedgerPolicy)
register_policy("taper-paper", PublishedTaperPolicy)
register_policy("triage", TriagePolicy)
