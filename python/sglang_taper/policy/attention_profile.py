"""Measured constants of the attention gate, as a file holds them.

`benchmark/shared_prefix_gpu.py` writes it: a list with one entry per device, layer
shape and way to read a prefix once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sglang_taper.errors import FieldError
from sglang_taper.policy.attention_gate import (
    AttentionConstants,
    LayerShape,
    constants_from_profile,
)

FIELD = "attention_profile"
TEXTS = ("device", "heads", "name")
KEYS = (*TEXTS, "tile_rows", "constants")


class MeasuredAttention(msgspec.Struct, frozen=True):
    """Constants of one way to attend on one device.

    `heads` is `query heads/KV heads/head dimension` of a layer on one rank, `name` the
    way that was timed against plain attention.
    """

    device: str
    heads: str
    name: str
    tile_rows: int
    constants: AttentionConstants

    @property
    def shape(self) -> LayerShape:
        """The layer that was measured, with 16-bit KV."""
        num_q, num_kv, dim = map(int, self.heads.split("/"))
        return LayerShape(num_kv, num_q // num_kv, dim, tile_rows=self.tile_rows)


def heads_label(num_q: int, num_kv: int, dim: int) -> str:
    return f"{num_q}/{num_kv}/{dim}"


def measured_from_profile(profile: object) -> list[MeasuredAttention]:
    """The entries of a file's content.

    Raises FieldError naming the entry and the key for anything unexpected.
    """
    if not isinstance(profile, list) or not profile:
        raise FieldError(FIELD, profile, "a list with an entry per measurement")
    return [_entry(f"{FIELD}[{i}]", raw) for i, raw in enumerate(profile)]


def find_measured(
    entries: Sequence[MeasuredAttention], device: str, heads: str, name: str
) -> MeasuredAttention | None:
    """The entry for exactly this device, layer and way; None: not measured."""
    wanted = (device, heads, name)
    found = (e for e in entries if (e.device, e.heads, e.name) == wanted)
    return next(found, None)


def _entry(name: str, raw: object) -> MeasuredAttention:
    if not isinstance(raw, Mapping) or set(raw) != set(KEYS):
        raise FieldError(name, raw, "an object with the keys " + ", ".join(KEYS))
    for key in TEXTS:
        if not isinstance(raw[key], str):
            raise FieldError(f"{name}.{key}", raw[key], "a text")
    tile_rows = raw["tile_rows"]
    if type(tile_rows) is not int or tile_rows < 1:
        raise FieldError(f"{name}.tile_rows", tile_rows, "an integer, at least 1")
    if not isinstance(raw["constants"], Mapping):
        raise FieldError(f"{name}.constants", raw["constants"], "an object")
    _check_heads(f"{name}.heads", raw["heads"])
    return MeasuredAttention(
        device=raw["device"],
        heads=raw["heads"],
        name=raw["name"],
        tile_rows=tile_rows,
        constants=constants_from_profile(raw["constants"]),
    )


def _check_heads(name: str, heads: str) -> None:
    parts = heads.split("/")
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(parts) != 3 or len(numbers) != 3 or 0 in numbers or numbers[0] % numbers[1]:
        accepted = "query heads/KV heads/head dimension, as in 64/8/128"
        raise FieldError(name, heads, accepted)
