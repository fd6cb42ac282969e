"""Whether a decode step should read shared prefixes once (`cascade`) or not (`plain`).

A cost model of one attention layer, with constants measured on the machine, predicts
both; cascade is chosen only if it is predicted to be faster by more than the model is
known to err. The caller passes its previous decision, so that predictions near the
limit do not make the mode flicker. Nothing is counted or remembered here.

Times are microseconds per layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from sglang_taper.errors import FieldError

# Predicted gain, as a share of the plain time, below which cascade is never chosen,
# on top of the model's own error; and how much more it takes to change to it.
MIN_GAIN, HYSTERESIS = 0.03, 0.05


class AttentionMode(StrEnum):
    """How a decode step reads the KV of shared prefixes."""

    PLAIN = "plain"  # once per row
    CASCADE = "cascade"  # once per segment


class GateReason(StrEnum):
    """Why the gate decided so."""

    UNMEASURED = "unmeasured"  # plain: no constants of this machine
    UNSUPPORTED = "unsupported"  # plain: the step needs what cascade can not do
    NOTHING_SHARED = "nothing_shared"  # plain: no segment with two rows
    NO_GAIN = "no_gain"  # plain: the predicted gain is below the limit
    GAIN = "gain"  # cascade: it is above
    HELD = "held"  # as before: it is between the two limits


class SharedSegment(msgspec.Struct, frozen=True):
    """`num_rows` rows that read the same `num_tokens` tokens. A tree has several."""

    num_rows: int
    num_tokens: int


class StepShape(msgspec.Struct, frozen=True):
    """What the two predictions depend on. Private tokens are summed over the rows."""

    segments: tuple[SharedSegment, ...]
    num_rows: int
    private_tokens: int


class LayerShape(msgspec.Struct, frozen=True):
    """One attention layer as one rank computes it, and the tiles it is computed in.

    `head_ratio` is query heads per KV head. `tile_rows` is how many packed queries
    (row, head of the ratio) one pass over a segment's keys serves.
    """

    num_kv_heads: int
    head_ratio: int
    head_dim: int
    kv_element_bytes: int = 2
    tile_rows: int = 64

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.kv_element_bytes

    def tiled_tokens(self, step: StepShape) -> int:
        """Keys read from shared segments: each once per tile of its rows."""
        return sum(
            -(-s.num_rows * self.head_ratio // self.tile_rows) * s.num_tokens
            for s in step.segments
        )

    def cascade_flop(self, step: StepShape) -> int:
        """Two matrix products per tile, whether its rows are live or not."""
        per_token = 4 * self.tile_rows * self.head_dim * self.num_kv_heads
        return per_token * self.tiled_tokens(step)


class AttentionConstants(msgspec.Struct, frozen=True):
    """What was measured on a machine; `attention_fit` makes them from timings.

    `dram_bytes_per_us` and `cached_bytes_per_us` are the rates at which KV is read the
    first time and again by others at the same time. `flop_per_us` is the rate of the
    tiles. `base_us` is a layer's attention without any KV; `extra_us` and
    `extra_us_per_row` are what cascade adds (launches, partial results, merge).
    `error` is the largest relative error, on the timings, of the predicted ratio of
    the two modes.
    """

    dram_bytes_per_us: float
    cached_bytes_per_us: float
    flop_per_us: float
    base_us: float
    extra_us: float
    extra_us_per_row: float
    error: float

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            _check_number(field, getattr(self, field))
        for field in ("dram_bytes_per_us", "cached_bytes_per_us", "flop_per_us"):
            if getattr(self, field) == 0:
                raise FieldError(_name(field), 0, "above 0")
        if self.cached_bytes_per_us < self.dram_bytes_per_us:
            accepted = f"at least dram_bytes_per_us={self.dram_bytes_per_us}"
            raise FieldError(
                _name("cached_bytes_per_us"), self.cached_bytes_per_us, accepted
            )


class GateDecision(msgspec.Struct, frozen=True):
    """Mode of a step, why, and the predicted gain (share of the plain time saved)."""

    mode: AttentionMode
    reason: GateReason
    gain: float = 0.0


def predict_plain_us(
    constants: AttentionConstants, shape: LayerShape, step: StepShape
) -> float:
    """Attention of a layer when every row reads its whole context.

    Rows that share a segment read it at about the same time, so all but the first
    may find it in the cache: whichever limit binds, of what memory delivers once and
    the cache delivers to everybody.
    """
    once = sum(s.num_tokens for s in step.segments) + step.private_tokens
    each = sum(s.num_rows * s.num_tokens for s in step.segments) + step.private_tokens
    read_us = max(
        once / constants.dram_bytes_per_us, each / constants.cached_bytes_per_us
    )
    return constants.base_us + shape.kv_bytes_per_token * read_us


def predict_cascade_us(
    constants: AttentionConstants, shape: LayerShape, step: StepShape
) -> float:
    """Attention of a layer when every segment is read once per tile of its rows."""
    once = sum(s.num_tokens for s in step.segments)
    token_bytes = shape.kv_bytes_per_token
    shared_us = max(
        token_bytes * once / constants.dram_bytes_per_us,
        token_bytes * shape.tiled_tokens(step) / constants.cached_bytes_per_us,
        shape.cascade_flop(step) / constants.flop_per_us,
    )
    private_us = token_bytes * step.private_tokens / constants.dram_bytes_per_us
    extra_us = constants.extra_us + constants.extra_us_per_row * step.num_rows
    return constants.base_us + shared_us + private_us + extra_us


def predicted_gain(
    constants: AttentionConstants, shape: LayerShape, step: StepShape
) -> float:
    """Share of the plain time that cascade saves; negative if it is slower."""
    plain_us = predict_plain_us(constants, shape, step)
    if plain_us <= 0:
        return 0.0
    return 1 - predict_cascade_us(constants, shape, step) / plain_us


def pays(
    constants: AttentionConstants, shape: LayerShape, segment: SharedSegment
) -> bool:
    """Whether a segment is worth reading once in a step that is cascade anyway.

    One that does not pay is better left to its rows' private parts.
    """
    free = msgspec.structs.replace(constants, extra_us=0.0, extra_us_per_row=0.0)
    step = StepShape((segment,), segment.num_rows, 0)
    return predict_cascade_us(free, shape, step) < predict_plain_us(free, shape, step)


def decide(
    constants: AttentionConstants | None,
    shape: LayerShape,
    step: StepShape,
    previous: AttentionMode = AttentionMode.PLAIN,
    *,
    supported: bool = True,
) -> GateDecision:
    """The mode of a step; `previous` is that of the step before.

    Plain without constants, without segments of two rows, or if the caller says that
    cascade can not do this step. Never cascade with a predicted gain below
    `MIN_GAIN + constants.error`.
    """
    if not supported:
        return GateDecision(AttentionMode.PLAIN, GateReason.UNSUPPORTED)
    if constants is None:
        return GateDecision(AttentionMode.PLAIN, GateReason.UNMEASURED)
    if not any(s.num_rows > 1 and s.num_tokens > 0 for s in step.segments):
        return GateDecision(AttentionMode.PLAIN, GateReason.NOTHING_SHARED)
    gain = predicted_gain(constants, shape, step)
    limit = MIN_GAIN + constants.error
    if gain >= limit + HYSTERESIS:
        return GateDecision(AttentionMode.CASCADE, GateReason.GAIN, gain)
    if gain < limit:
        return GateDecision(AttentionMode.PLAIN, GateReason.NO_GAIN, gain)
    return GateDecision(previous, GateReason.HELD, gain)


def constants_to_profile(constants: AttentionConstants) -> dict[str, float]:
    """As JSON-ready data; `constants_from_profile` makes equal ones."""
    return {k: getattr(constants, k) for k in constants.__struct_fields__}


def constants_from_profile(profile: Mapping[str, object]) -> AttentionConstants:
    """Constants from `constants_to_profile` data.

    Raises FieldError for a missing or unknown key and for a value out of range.
    """
    known: Sequence[str] = AttentionConstants.__struct_fields__
    for key in profile:
        if key not in known:
            accepted = "known keys are " + ", ".join(known)
            raise FieldError(_name(key), profile[key], accepted)
    numbers = {key: _check_number(key, profile.get(key)) for key in known}
    return AttentionConstants(**numbers)


def _check_number(field: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise FieldError(_name(field), value, "a finite number, at least 0")
    return float(value)  # type: ignore[arg-type]


def _name(field: str) -> str:
    return f"attention_profile.{field}"
