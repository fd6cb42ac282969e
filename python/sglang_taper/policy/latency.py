"""Step-latency model `T = a + b*rows + c*kv_tokens`, learned while the server runs.

Fitted to its first steps by least squares on relative errors, and then filtered step
by step (latency_filter.py). Relative errors make a step that is 50 times too long (a
compilation, a page fault) count next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence

from sglang_taper.errors import FieldError
from sglang_taper.policy.latency_filter import StepFilter
from sglang_taper.policy.latency_fit import Sample, robust_fit, sample_of
from sglang_taper.policy.types import LatencyCoefficients

# Anything outside is a broken clock, and its square would leave the float range.
MIN_STEP_MS, MAX_STEP_MS = 1e-3, 1e7
MIN_SAMPLES = 16
# A profile's coefficients are known to about this share of themselves.
PROFILE_SPREAD = 0.1
HEALTH_WINDOW = 64
# MAPE above which the model is not trusted, and below which it is again.
MAX_MAPE, GOOD_MAPE = 0.30, 0.20
# The engine has changed when most recent predictions are this wrong on one side.
DRIFT_ERROR, DRIFT_WINDOW, DRIFT_EXCEPTIONS = 0.25, 16, 3

_PROFILE_NUMBERS = ("a_ms", "b_ms_per_row", "c_ms_per_token")
_PROFILE_KEYS = (*_PROFILE_NUMBERS, "shared_read_once", "graph_buckets")
# A profile may also say this to the simulator; or how it came about; or be what
# GET /taper/state says.
SIMULATOR_KEYS = ("source", "prefill", "group_ms", "max_kv_tokens", "chunk_tokens")
_STATE_KEYS = ("trusted", "pace", "mape", "num_samples", "num_drifts")
_IGNORED_KEYS = (*_STATE_KEYS, "calibration", *SIMULATOR_KEYS)


def bucket_rows(rows: int, graph_buckets: Sequence[int]) -> int:
    """`rows` rounded up to a captured batch size; above the largest, not rounded."""
    index = bisect_left(graph_buckets, rows)
    return graph_buckets[index] if index < len(graph_buckets) else rows


def predict_ms(model: LatencyCoefficients, rows: int, kv_tokens: int) -> float:
    """Predicted latency of a step; never falls when rows or tokens are added."""
    if model.graph_buckets:
        rows = bucket_rows(rows, model.graph_buckets)
    return model.a_ms + model.b_ms_per_row * rows + model.c_ms_per_token * kv_tokens


class StepLatencyModel:
    """Learns the coefficients from observed steps and says whether to trust them.

    Not trusted before `MIN_SAMPLES` steps (unless made from a profile), nor from a
    MAPE above `MAX_MAPE` until one below `GOOD_MAPE`. `shared_read_once` and
    `graph_buckets` are as in `LatencyCoefficients` and describe the engine.
    """

    def __init__(
        self,
        *,
        shared_read_once: bool = False,
        graph_buckets: Sequence[int] = (),
    ) -> None:
        self.shared_read_once = shared_read_once
        self.graph_buckets = tuple(graph_buckets)
        # Times that the engine was found to have changed its speed, and steps seen.
        self.num_drifts = self.num_samples = 0
        self._errors: deque[float] = deque(maxlen=HEALTH_WINDOW)
        # The steps before the first fit.
        self._first: list[Sample] = []
        self._filter: StepFilter | None = None
        # Fitted time over measured time, without the pace.
        self._ratios: deque[float] = deque(maxlen=DRIFT_WINDOW)
        self._healthy = True
        self._until_drift = DRIFT_WINDOW
        self._coefficients: LatencyCoefficients | None = None

    @property
    def trusted(self) -> bool:
        return self._filter is not None and self._healthy

    @property
    def pace(self) -> float:
        """How much longer than fitted steps take lately: part of every prediction."""
        return 1.0 if self._filter is None else self._filter.pace

    @property
    def mape(self) -> float | None:
        """Mean absolute relative error of recent predictions, each made before its
        step was observed; None before the first."""
        if not self._errors:
            return None
        return sum(map(abs, self._errors)) / len(self._errors)

    def coefficients(self) -> LatencyCoefficients:
        """The model as plans see it; all zero and not trusted before the first fit."""
        if self._coefficients is None:
            pace = self.pace
            a_ms, b_ms, c_ms = (pace * value for value in self._fit)
            self._coefficients = LatencyCoefficients(
                a_ms=a_ms,
                b_ms_per_row=b_ms,
                c_ms_per_token=c_ms,
                shared_read_once=self.shared_read_once,
                graph_buckets=self.graph_buckets,
                trusted=self.trusted,
                error=min(1.0, self.mape or 0.0),
            )
        return self._coefficients

    def predict(self, rows: int, kv_tokens: int) -> float:
        """Predicted ms of a step; 0 before the first fit."""
        return predict_ms(self.coefficients(), rows, kv_tokens)

    def observe(self, rows: int, kv_tokens: int, step_ms: float) -> None:
        """Learn from a step that took `step_ms`.

        A step without rows, or with a time no step can take, says nothing about
        latency and is ignored. Takes tens of microseconds.
        """
        if rows < 1 or kv_tokens < 0 or not MIN_STEP_MS <= step_ms <= MAX_STEP_MS:
            return
        if self._filter is not None:
            self._errors.append(self.predict(rows, kv_tokens) / step_ms - 1)
            self._update_health()
        rows = bucket_rows(rows, self.graph_buckets)
        self._learn(sample_of(rows, kv_tokens, step_ms))
        self.num_samples += 1
        self._coefficients = None

    def _learn(self, sample: Sample) -> None:
        if self._filter is None:
            self._first.append(sample)
            if len(self._first) == MIN_SAMPLES:
                self._filter = StepFilter.fitted(robust_fit(self._first), self._first)
            return
        ratio = self._filter.observe(sample)
        self._ratios.append(ratio)
        self._until_drift -= 1
        if self._until_drift <= 0 and abs(ratio - 1) > DRIFT_ERROR:
            self._follow_drift(self._filter)

    @property
    def _fit(self) -> Sequence[float]:
        return (0.0, 0.0, 0.0) if self._filter is None else self._filter.coefficients

    def _update_health(self) -> None:
        mape = self.mape
        if mape is None or len(self._errors) < MIN_SAMPLES:
            return
        self._healthy = mape < GOOD_MAPE or (self._healthy and mape <= MAX_MAPE)

    def _follow_drift(self, learned: StepFilter) -> None:
        """If the engine has changed, assume that it did so in all three terms: a
        machine half as fast is slower in each. What steps tell otherwise is learned.
        """
        slower = [ratio for ratio in self._ratios if ratio < 1 - DRIFT_ERROR]
        faster = [ratio for ratio in self._ratios if ratio > 1 + DRIFT_ERROR]
        changed = sorted(slower if len(slower) > len(faster) else faster)
        median = changed[len(changed) // 2]
        if len(changed) < DRIFT_WINDOW - DRIFT_EXCEPTIONS or median <= 0:
            return
        learned.rescale(1 / median)
        self._ratios.clear()
        self.num_drifts += 1
        self._until_drift = DRIFT_WINDOW

    def to_profile(self) -> dict[str, object]:
        """The model as JSON-ready data, without the pace of the last steps;
        `from_profile` makes one with the same fit."""
        return {
            **dict(zip(_PROFILE_NUMBERS, self._fit, strict=True)),
            "shared_read_once": self.shared_read_once,
            "graph_buckets": list(self.graph_buckets),
        }

    @classmethod
    def from_profile(cls, profile: Mapping[str, object]) -> StepLatencyModel:
        """A trusted model from `to_profile` data.

        The three coefficients are required. Raises FieldError for a missing or
        unknown key, for a value outside [0, `MAX_STEP_MS`], and if all coefficients
        are 0.
        """
        for key in profile:
            if key not in _PROFILE_KEYS and key not in _IGNORED_KEYS:
                accepted = "known keys are " + ", ".join(_PROFILE_KEYS)
                raise FieldError(f"latency_profile.{key}", profile[key], accepted)
        model = cls(
            shared_read_once=_profile_flag(profile.get("shared_read_once", False)),
            graph_buckets=_profile_buckets(profile.get("graph_buckets", [])),
        )
        fit = [_profile_number(k, profile.get(k)) for k in _PROFILE_NUMBERS]
        if not any(fit):
            accepted = "above 0 where b_ms_per_row and c_ms_per_token are 0"
            raise FieldError("latency_profile.a_ms", fit[0], accepted)
        model._filter = StepFilter(fit, [PROFILE_SPREAD * value for value in fit])
        return model


def _profile_number(key: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_STEP_MS:  # type: ignore[operator]
        accepted = f"a number from 0 to {MAX_STEP_MS:.0f}"
        raise FieldError(f"latency_profile.{key}", value, accepted)
    return float(value)  # type: ignore[arg-type]


def _profile_flag(value: object) -> bool:
    if not isinstance(value, bool):
        field = "latency_profile.shared_read_once"
        raise FieldError(field, value, "true or false")
    return value


def _profile_buckets(value: object) -> tuple[int, ...]:
    buckets = value if isinstance(value, list | tuple) else (None,)
    integers = all(type(size) is int and size > 0 for size in buckets)
    if not integers or sorted(set(buckets)) != list(buckets):
        accepted = "a list of ascending positive integers"
        raise FieldError("latency_profile.graph_buckets", value, accepted)
    return tuple(buckets)
