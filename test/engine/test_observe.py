"""What a step view says about requests that wait for prefill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_taper.engine.clock import TaperTick
from sglang_taper.engine.observe import observe_batch
from sglang_taper.policy.state import BranchState, RequestState, StepBuilder
from sglang_taper.policy.types import LatencyCoefficients, PolicyParams, StepView


class Tokens(list):
    """As a tensor of lengths."""

    def tolist(self) -> list[int]:
        return list(self)


def waiting(arrival_ms: float, has_token: bool = False, let_go: bool = True) -> Any:
    request = RequestState("g", arrival_ms, 2000.0, 50.0)
    if has_token:
        request.record_tokens(arrival_ms + 1)
    state = BranchState(request, 0, 0, 8)
    return SimpleNamespace(taper=SimpleNamespace(state=state, is_let_go=let_go))


def observed(*queue: Any, hold: str = "off") -> StepView:
    batch: Any = SimpleNamespace(
        seq_lens_cpu=Tokens([7]), reqs=[SimpleNamespace(to_finish=None)]
    )
    return observe_batch(
        StepBuilder(),
        batch,
        [BranchState(RequestState("r", 0.0, 2000.0, 50.0), 0, 0, 8)],
        1,
        TaperTick(1500.0, LatencyCoefficients(), 0.1, 25.0),
        PolicyParams(prefill_hold_s=hold),
        queue,
    )


def test_the_first_request_without_a_token_tells_how_much_of_its_ttft_is_gone() -> None:
    view = observed(waiting(100.0, has_token=True), waiting(500.0), waiting(900.0))
    assert view.num_waiting_prefill == 3
    assert view.waiting_ttft_share == pytest.approx(0.5)


@pytest.mark.parametrize("queue", [(), (waiting(100.0, has_token=True),)])
def test_nobody_runs_out_of_time_where_nobody_waits_for_a_first_token(
    queue: tuple[Any, ...],
) -> None:
    assert observed(*queue).waiting_ttft_share == 0.0


def test_a_prefill_that_is_held_does_not_wait_for_room() -> None:
    queue = (waiting(500.0, let_go=False), waiting(900.0))
    view = observed(*queue, hold="auto")
    assert (view.num_waiting_prefill, view.waiting_ttft_share) == (1, 0.3)
    assert observed(*queue).num_waiting_prefill == 2


def test_the_tick_says_how_much_time_stalls_take_and_how_long_one_is() -> None:
    view = observed()
    assert (view.stall_share, view.mean_stall_ms) == (0.1, 25.0)
