"""Small inputs that broke other engines, each a test named after its number.

They come from public bug reports of people who fork, sample in parallel and cache
prefixes. `PROVED` names the tests of those that another module is about anyway; with
the `test_case_*` functions of the three modules here no number is left out.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BRANCHES = "e2e/test_branches.py::test_"
FAULTS = "e2e/test_faults.py::test_"
EQUALITY = "e2e/test_equality.py::test_"
SHARING = "e2e/test_fork_sharing.py::test_"
REFUSALS = "engine/test_refusals.py::test_"
REFUSED = f"{REFUSALS}a_refusal_names_the_flag_and_the_way_out"

SHARED = "e2e/test_shared_prefix.py::test_"
STREAMS = "e2e/test_many_streams.py::test_"

NUMBERS = {
    *(1, 2, 3, 4, 6, 8, 10, 11, 12, 14, 16, 17, 18, 20, 22, 24, 25, 26, 27, 28, 29),
    *(30, 31, 32, 33, 34, 35, 37, 38, 39, 40, 41, 42, 43, 44, 46, 47, 49, 50, 51, 52),
    *(53, 55, 56, 57, 58, 59, 60, 61, 64, 65, 66, 67, 68),
}
# Not here: 21 is the order of SGLang's prefills, which no policy of ours changes (a
# prefill in chunks goes first); 36 is a benchmark of another machine.

PROVED = {
    3: (
        "n=2 gives one object",
        f"{BRANCHES}samples_of_one_prompt_are_branches_of_one_group",
    ),
    8: (
        "children decode on after a disconnect",
        f"{FAULTS}a_disconnect_ends_all_branches_of_the_stream",
    ),
    10: (
        "leak with pages of 16 and mixed chunks: the mode is refused",
        "e2e/test_entry_points.py::"
        "test_what_we_refuse_ends_with_code_2_and_one_paragraph",
    ),
    11: ("leak with pages and speculative decoding: the mode is refused", REFUSED),
    14: (
        "two generations spliced after a retraction",
        f"{EQUALITY}outputs_are_equal_under_forced_retraction_without_overlap",
    ),
    20: (
        "the more important request does not go first",
        "policy/test_admission.py::"
        "test_priority_utility_prefers_the_more_important_request",
    ),
    22: (
        "clients see far longer gaps than the scheduler",
        f"{STREAMS}clients_see_the_latency_that_the_scheduler_measures",
    ),
    26: ("n>1 hangs under a prefill/decode split: the mode is refused", REFUSED),
    27: (
        "all forks at once compute their prefix each",
        f"{SHARING}siblings_that_arrive_together_prefill_their_prefix_once",
    ),
    28: (
        "the prefix is read once per branch",
        f"{SHARED}branches_of_a_fork_read_its_prefix_once",
    ),
    33: (
        "children land on other ranks: DP attention is refused",
        f"{REFUSALS}attention_data_parallelism_is_seen_by_its_old_flag_too",
    ),
    39: (
        "a prompt in chunks is forked or aborted at its second",
        f"{SHARING}a_branch_aborted_at_its_second_chunk_leaves_nothing_behind",
        f"{SHARING}children_of_a_prefilling_parent_wait_for_what_it_computes",
    ),
    40: (
        "an abort misses samples, or takes ids that begin alike",
        f"{FAULTS}abort_takes_exact_ids",
        f"{FAULTS}one_call_aborts_a_group_and_nobody_else",
        f"{FAULTS}a_group_abort_reaches_samples_that_are_still_on_their_way",
    ),
    41: (
        "freed duplicates stay in the page table of siblings",
        f"{SHARING}siblings_that_arrive_together_prefill_their_prefix_once",
    ),
    43: (
        "penalties are lost when a batch is rebuilt",
        f"{EQUALITY}penalties_see_the_same_tokens_as_without_deferring",
    ),
    44: (
        "cascade gives other answers",
        f"{SHARED}greedy_text_and_logprobs_equal_stock",
        f"{SHARED}forks_beside_serial_requests_equal_stock",
    ),
    47: (
        "cascade hangs with FlashInfer",
        "e2e/test_shared_prefix_gpu.py::test_greedy_text_of_a_fork_equals_stock",
    ),
    50: (
        "cascade is slower than plain attention",
        "policy/test_attention_gate.py::"
        "test_cascade_is_never_chosen_for_less_than_the_margin",
        "policy/test_attention_gate.py::test_few_kv_heads_and_short_prefixes_stay_plain",
    ),
    51: (
        "the whole block table is scanned at every step",
        "engine/test_prefixes.py::test_slots_are_compared_once_while_the_branches_stay",
    ),
    57: ("a split sends the prompt n times: the mode is refused", REFUSED),
    58: (
        "a prompt beyond the pool stalls everybody",
        f"{FAULTS}a_prompt_larger_than_the_pool_is_refused",
    ),
    59: (
        "a running row is never scheduled again",
        "policy/test_invariants.py::"
        "test_a_decode_loop_keeps_invariants_1_2_3_and_5_until_it_drains",
    ),
    61: (
        "n samples are not n calls, or are all equal",
        f"{BRANCHES}sampled_branches_differ_and_greedy_ones_equal_separate_calls",
    ),
    64: (
        "random errors above 50 requests at once",
        f"{BRANCHES}more_branches_than_slots_complete_in_waves",
    ),
}


def names_of_tests(path: Path) -> set[str]:
    """Names of the test functions of a module, from its syntax tree."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def numbers_here() -> set[int]:
    """Of the `test_case_*` functions."""
    names = {
        n
        for p in Path(__file__).parent.glob("test_cases*.py")
        for n in names_of_tests(p)
    }
    found = (re.match(r"test_case_(\d\d)_", name) for name in names)
    return {int(match[1]) for match in found if match}


@pytest.mark.parametrize("number", sorted(NUMBERS))
def test_every_case_has_a_test(number: int) -> None:
    for test in PROVED.get(number, ())[1:]:
        module, _, name = test.partition("::")
        assert name in names_of_tests(TESTS / module)
    assert (number in PROVED) != (number in numbers_here())
