"""Each row's penalties get the token before the one its next step consumes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch

from sglang_taper.engine.penalties import (
    cumulate_penalty_output_tokens_hook,
    lagging_token,
)

PROMPT = array("q", [10, 11, 12])


def test_the_first_step_takes_the_last_prompt_token() -> None:
    assert lagging_token(PROMPT, array("q"), 3) == 12


def test_a_token_in_flight_makes_no_difference() -> None:
    in_flight, processed = array("q", [7]), array("q", [7, 8])
    assert lagging_token(PROMPT, in_flight, 4) == 7
    assert lagging_token(PROMPT, processed, 4) == 7


def test_after_a_retraction_outputs_are_part_of_the_prefix() -> None:
    assert lagging_token(PROMPT, array("q", [7, 8]), 5) == 8


class Recorder:
    """Stands where SGLang's penalizers stand, to see the tokens they get."""

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        self.tokens = output_ids.tolist()


def test_the_rows_of_a_beam_group_get_no_token_of_ours() -> None:
    req = SimpleNamespace(origin_input_ids=PROMPT, output_ids=array("q", [7]))
    penalizers = Recorder()
    batch = SimpleNamespace(
        enable_overlap=True,
        reqs=[req],
        seq_lens_cpu=torch.tensor([4, 4, 4]),
        device="cpu",
        sampling_info=SimpleNamespace(penalizer_orchestrator=penalizers),
    )
    cumulate_penalty_output_tokens_hook(lambda _: None, batch)
    assert penalizers.tokens == [7]
