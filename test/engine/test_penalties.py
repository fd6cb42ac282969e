"""Each row's penalties get the token before the one its next step consumes."""

from __future__ import annotations

from array import array

from sglang_taper.engine.penalties import lagging_token

PROMPT = array("q", [10, 11, 12])


def test_the_first_step_takes_the_last_prompt_token() -> None:
    assert lagging_token(PROMPT, array("q"), 3) == 12


def test_a_token_in_flight_makes_no_difference() -> None:
    in_flight, processed = array("q", [7]), array("q", [7, 8])
    assert lagging_token(PROMPT, in_flight, 4) == 7
    assert lagging_token(PROMPT, processed, 4) == 7


def test_after_a_retraction_outputs_are_part_of_the_prefix() -> None:
    assert lagging_token(PROMPT, array("q", [7, 8]), 5) == 8
