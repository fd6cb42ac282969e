"""What a simulated machine costs: decode steps, prefills, and how much it holds.

A profile is a `--latency-profile` file with more keys, which a server ignores: where
the numbers come from (`source`), `prefill` (`a_ms + max(min_ms, ms_per_token *
tokens)` per prefill step), `group_ms` (added to a step for each request with several
rows in it, when its shared prefix is read once), `max_kv_tokens` and `chunk_tokens`.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.policy.latency import (
    MAX_STEP_MS,
    SIMULATOR_KEYS,
    StepLatencyModel,
)
from sglang_taper.policy.types import LatencyCoefficients

_FOLDER = "sglang_taper.sim.profiles"
_Cost = Annotated[float, msgspec.Meta(ge=0, le=MAX_STEP_MS)]


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Duration of a prefill step of n tokens: `a + max(min, per_token * n)` ms."""

    a_ms: _Cost
    ms_per_token: _Cost
    min_ms: _Cost = 0.0

    @property
    def costs(self) -> bool:
        """Whether a prefill takes any time."""
        return max(self.a_ms, self.ms_per_token, self.min_ms) > 0

    def duration_ms(self, num_tokens: int) -> float:
        return self.a_ms + max(self.min_ms, self.ms_per_token * num_tokens)


class Machine(msgspec.Struct, frozen=True):
    """A profile, read. `decode` is what steps really cost in the simulation."""

    decode: LatencyCoefficients
    prefill: Prefill = Prefill(0.0, 0.0)
    source: str = ""
    group_ms: _Cost = 0.0
    max_kv_tokens: Annotated[float, msgspec.Meta(ge=1)] = math.inf
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = 8192


def profile_names() -> tuple[str, ...]:
    """The profiles that come with the package."""
    files = resources.files(_FOLDER).iterdir()
    return tuple(sorted(f.name[:-5] for f in files if f.name.endswith(".json")))


def read_machine(name: str) -> Machine:
    """The profile of that name, or in the file of that name; raises FieldError."""
    if name in profile_names():
        text = (resources.files(_FOLDER) / f"{name}.json").read_text()
    else:
        text = _read_file(name)
    try:
        facts = json.loads(text)
    except ValueError as error:
        raise FieldError("--profile", name, f"a JSON file ({error})") from None
    if not isinstance(facts, dict):
        raise FieldError("--profile", name, "a file with one JSON object")
    return make_machine(facts)


def _read_file(name: str) -> str:
    try:
        return Path(name).read_text()
    except (OSError, ValueError):
        accepted = "one of " + ", ".join(profile_names()) + ", or a readable JSON file"
        raise FieldError("--profile", name, accepted) from None


def make_machine(facts: dict[str, Any]) -> Machine:
    """A machine from the contents of a profile; raises FieldError."""
    decode = StepLatencyModel.from_profile(facts).coefficients()
    ours = {key: facts[key] for key in SIMULATOR_KEYS if key in facts}
    try:
        return msgspec.convert({"decode": decode, **ours}, Machine)
    except msgspec.ValidationError as error:
        raise FieldError("--profile", ours, f"a valid profile: {error}") from None
