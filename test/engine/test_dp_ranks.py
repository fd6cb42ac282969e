"""Which data-parallel rank a grouped request is sent to."""

from __future__ import annotations

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_taper.engine.dp_ranks import keep_group_together_hook, rank_of_group


def routed(custom_params: Any, num_ranks: int = 4, named: int | None = None) -> Any:
    """The rank that a request would be sent to; None leaves it to SGLang."""
    tokenized = TokenizedGenerateReqInput(
        input_text="",
        input_ids=array("q", [1, 2]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(custom_params=custom_params),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        routed_dp_rank=named,
    )
    manager = SimpleNamespace(elastic_worker_count=num_ranks)
    keep_group_together_hook(tokenized, manager, object(), "", [1, 2])
    return tokenized.routed_dp_rank


def of_group(group: str, **others: Any) -> dict[str, Any]:
    return {"taper": {"group": group, **others}}


def test_every_stage_and_branch_of_a_group_goes_to_one_rank() -> None:
    ranks = {
        routed(of_group("r-17", branch=branch, stage=stage, depth=1, width=8))
        for branch in range(8)
        for stage in range(3)
    }
    assert ranks == {rank_of_group("r-17", 4)}


def test_the_rank_of_a_group_does_not_depend_on_the_process() -> None:
    # Python's own hash of a string differs between processes.
    assert [rank_of_group(f"group-{i}", 8) for i in range(6)] == [0, 5, 3, 2, 6, 0]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_groups_spread_evenly_over_the_ranks(num_ranks: int) -> None:
    num_groups = 4000
    counts = Counter(rank_of_group(f"g{i}", num_ranks) for i in range(num_groups))
    fair = num_groups / num_ranks
    assert set(counts) == set(range(num_ranks))
    assert all(abs(count - fair) < 0.15 * fair for count in counts.values())


def test_a_rank_that_the_client_names_wins() -> None:
    other = (rank_of_group("g", 4) + 1) % 4
    assert routed(of_group("g"), named=other) == other


@pytest.mark.parametrize("custom_params", [None, {}, {"taper": {"tpot_slo_ms": 30.0}}])
def test_a_request_without_a_group_is_left_to_sglang(custom_params: Any) -> None:
    assert routed(custom_params) is None


def test_a_server_with_one_rank_is_left_alone() -> None:
    assert routed(of_group("g"), num_ranks=1) is None


def test_an_embedding_request_is_left_alone() -> None:
    embedding = SimpleNamespace(routed_dp_rank=None)
    keep_group_together_hook(embedding, SimpleNamespace(elastic_worker_count=2))
    assert embedding.routed_dp_rank is None
