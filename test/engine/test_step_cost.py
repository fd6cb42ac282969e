"""The test switch that makes decode steps cost more (fork_engine.py)."""

from __future__ import annotations

from unittest import mock

import msgspec
from fork_engine import ForkEngine
from fork_parts import Shape, engine_settings

from sglang_taper.engine import controller


def test_the_cost_is_added_to_decode_steps_only() -> None:
    shape = Shape("rust", 1, False)
    with engine_settings(shape), mock.patch.object(controller.time, "sleep") as sleep:
        engine = ForkEngine(shape)
        engine.send("a", [3] * 60, 5, {})
        while not engine.running_batch.reqs:
            engine.step()
        assert sleep.call_count == 0
        before = engine.taper.counters.num_steps
        params = engine.taper.params
        engine.taper.params = msgspec.structs.replace(params, test_step_cost_ms=40.0)
        while engine.step():
            pass
        num_steps = engine.taper.counters.num_steps - before
    assert num_steps > 0
    assert [call.args for call in sleep.call_args_list] == [(0.04,)] * num_steps
