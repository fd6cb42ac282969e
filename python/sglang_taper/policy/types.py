"""What a policy sees and what it answers.

A `StepView` is columnar (one list per fact, one entry per row of the decode batch,
in batch order) because it is rebuilt at every decode step for up to hundreds of
rows: see docs/adr/0002. `StepView.row(i)` gives one row as a `BranchView`.

Times are milliseconds on the step clock; only differences have a meaning.

Hundreds of these are made per second and none is part of a reference cycle, hence
`gc=False`: they do not make the garbage collector run.
"""

from __future__ import annotations

import msgspec


class LatencyCoefficients(msgspec.Struct, frozen=True, gc=False):
    """Step latency `T = a + b*rows + c*kv_tokens` (TAPER section 3; never negative).

    `kv_tokens` counts a prefix shared by a group once when `shared_read_once`, else
    once for each row. `graph_buckets` are the ascending captured batch sizes; rows
    are rounded up to the next one (empty: no rounding). `trusted` is False while the
    model is not calibrated or its error is too large; policies that predict then run
    the baseline step only. `error` is the mean absolute relative error of its recent
    predictions, at most 1.
    """

    a_ms: float = 0.0
    b_ms_per_row: float = 0.0
    c_ms_per_token: float = 0.0
    shared_read_once: bool = False
    graph_buckets: tuple[int, ...] = ()
    trusted: bool = False
    error: float = 0.0


class PolicyParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a policy that can be changed while the server runs."""

    policy: str = "taper"
    cap: int = 2
    rho: float | None = None
    deadline: str = "schedule"
    utility: str = "linear"
    ttft_slo_ms: float = 2000.0
    tpot_slo_ms: float = 50.0
    prefill_hold_s: str | float = "off"
    test_step_cost_ms: float = 0.0

    @property
    def slack_fraction(self) -> float:
        """Rho in force: 0.3 with `schedule` deadlines and 0.8 with `progress`."""
        if self.rho is not None:
            return self.rho
        return 0.3 if self.deadline == "schedule" else 0.8


class BranchView(msgspec.Struct, frozen=True, gc=False):
    """One row of the decode batch. Made on demand by `StepView.row`."""

    row: int
    request: int
    branch: int
    context_tokens: int
    shared_tokens: int
    output_tokens: int
    remaining_tokens: int
    last_run_step: int
    must_run: bool


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """One request: its SLOs and its progress. Its rows: `StepView.rows_of`.

    `first_token_ms` is None until
    the request's first token; `num_tokens` counts the tokens of all its branches
    (finished ones included) since then, that one included. `schedule_origin_ms` is
    `first_token_ms` plus the time the request has spent away from decode since.
    `last_progress_ms` is when any of its branches last got a token, or when it last
    re-entered decode. `remaining_tokens` is an upper bound over its branches.
    """

    group: str
    arrival_ms: float
    first_token_ms: float | None
    schedule_origin_ms: float
    last_progress_ms: float
    num_tokens: int
    remaining_tokens: int
    ttft_slo_ms: float
    tpot_slo_ms: float
    priority: float = 1.0


class StepView(msgspec.Struct, frozen=True, gc=False):
    """Everything a policy may know about the next decode step.

    `num_waiting_prefill` requests wait for room; `waiting_ttft_share` is the largest
    share of its TTFT SLO that one of them without a first token has waited.
    `stall_share` of busy time goes to prefills, `mean_stall_ms` to each.
    """

    step: int
    now_ms: float
    requests: list[RequestView]
    # one entry per row, in batch order
    request_of_row: list[int]
    branch: list[int]
    context_tokens: list[int]
    shared_tokens: list[int]
    output_tokens: list[int]
    remaining_tokens: list[int]
    last_run_step: list[int]
    # rows that every plan must include (ascending)
    must_run: list[int]
    params: PolicyParams
    model: LatencyCoefficients
    num_waiting_prefill: int = 0
    stall_share: float = 0.0
    mean_stall_ms: float = 0.0
    waiting_ttft_share: float = 0.0

    @property
    def num_rows(self) -> int:
        return len(self.request_of_row)

    def rows_of(self, request: int) -> list[int]:
        """Ascending rows of `requests[request]`, at least one. Looks at all rows."""
        return [i for i, owner in enumerate(self.request_of_row) if owner == request]

    def row(self, i: int) -> BranchView:
        return BranchView(
            row=i,
            request=self.request_of_row[i],
            branch=self.branch[i],
            context_tokens=self.context_tokens[i],
            shared_tokens=self.shared_tokens[i],
            output_tokens=self.output_tokens[i],
            remaining_tokens=self.remaining_tokens[i],
            last_run_step=self.last_run_step[i],
            must_run=i in self.must_run,
        )


class AdmissionPlan(msgspec.Struct, frozen=True, gc=False):
    """The rows that run in this decode step, and why no more of them.

    `rows` is ascending and never empty for a non-empty view. `reason` is the binding
    constraint: `all` (nothing deferred), `budget`, `cap`, `baseline` (policy runs one
    branch per request), `triage` (requests are paused), `fallback` (latency model not
    trusted), `forced` (beam search is in the batch: every row runs). The milliseconds
    are None where the policy made no prediction; `min_slack_ms` is None when no
    request can be helped by protection.
    """

    rows: list[int]
    reason: str
    baseline_ms: float | None = None
    predicted_ms: float | None = None
    budget_ms: float | None = None
    min_slack_ms: float | None = None
