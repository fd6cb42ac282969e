from __future__ import annotations

import asyncio

import pytest

from sglang_taper.demo.load import FULL, QUICK, all_of, branch_steps, make_mix
from sglang_taper.demo.score import BranchSteps


@pytest.mark.parametrize("size", [FULL, QUICK])
def test_a_mix_has_the_size_that_was_asked_for(size) -> None:
    mix = make_mix(size, seed=1)
    assert len(mix.serial) == size.num_serial
    assert len(mix.forks) == size.num_forks
    low, high = size.fan_out
    assert all(low <= len(fork.suffixes) <= high for fork in mix.forks)
    low, high = size.branch_tokens
    assert all(low <= fork.num_tokens <= high for fork in mix.forks)


def test_a_seed_gives_the_same_mix_and_another_seed_another_one() -> None:
    assert make_mix(FULL, 3) == make_mix(FULL, 3)
    assert make_mix(FULL, 3) != make_mix(FULL, 4)


def test_no_two_requests_share_a_prompt() -> None:
    mix = make_mix(FULL, 0)
    prompts = [request.prompt for request in (*mix.serial, *mix.forks)]
    assert len(set(prompts)) == len(prompts)


def test_steps_are_taken_from_what_the_server_says_about_branches() -> None:
    infos = [{"taper": {"steps_run": 4, "steps_deferred": 9}}, {"id": "alone"}]
    assert branch_steps(infos) == [BranchSteps(run=4, deferred=9)]


def test_when_one_fails_the_others_are_stopped() -> None:
    stopped = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(all_of(wait(), fail()))
    assert stopped == [True]
