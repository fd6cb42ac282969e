"""The policies of a comparison, as `--policies` names them."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_taper.changes import parse_policy
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

    Parameters follow a colon, separated by colons or commas; `cap:2` is `cap:cap=2`.
    """
    load_extensions()
    names: list[str] = []
    for piece in text.split(","):
        if names and "=" in piece.partition(":")[0]:
            names[-1] += ":" + piece
        else:
            names.append(piece)
    contenders = [_contender(name.strip()) for name in names]
    labels = [contender.label for contender in contenders]
    if len(set(labels)) < len(labels):
        raise FieldError("--policies", text, "every policy once")
    return contenders


def _contender(name: str) -> Contender:
    if name == STOCK:
        return Contender(STOCK, {})
    kind, _, value = name.partition(":")
    spelled = f"cap:cap={value}" if kind == "cap" and value.isdigit() else name
    changes = parse_policy(spelled)
    make_policy(str(changes["policy"]))
    return Contender(name, changes)
