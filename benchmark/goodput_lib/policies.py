"""The policies of a comparison, as `--policies` names them."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_taper.changes import parse_policy, split_policies
from sglang_taper.errors import FieldError
from sglang_taper.extensions import load_extensions
from sglang_taper.policy.admission import make_policy
from sglang_taper.sim.sweep import SLO_BLIND

STOCK = "stock"


class Contender(msgspec.Struct, frozen=True):
    """A policy as it is run and shown; `changes` are for `POST /taper/policy`."""

    label: str
    changes: dict[str, Any]

    @property
    def is_stock(self) -> bool:
        """SGLang without our plugin: another server."""
        return self.label == STOCK

    @property
    def is_slo_blind(self) -> bool:
        """One run tells its goodput at every SLO."""
        return self.is_stock or self.changes["policy"] in SLO_BLIND


def parse_policies(text: str) -> list[Contender]:
    """`off,cap:2,taper:deadline=progress,rho=0.8,ledger,stock`; raises FieldError.

    Spelled as for `sglang-taper simulate`, and `stock`.
    """
    load_extensions()
    contenders = [_contender(name) for name in split_policies(text)]
    labels = [contender.label for contender in contenders]
    if len(set(labels)) < len(labels):
        raise FieldError("--policies", text, "every policy once")
    return contenders


def _contender(name: str) -> Contender:
    if name == STOCK:
        return Contender(STOCK, {})
    changes = parse_policy(name)
    make_policy(str(changes["policy"]))
    return Contender(name, changes)
