"""SGLang's own server tests (`sglang.test.kits`), sized for a small model on a CPU."""

from __future__ import annotations

import functools
import json
import random
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import openai
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin

from server import Server
from sglang_taper.models import ensure_smollm2


class RadixCacheServerMixin:
    """A tree of prompts that continue each other, in one call."""

    base_url: str

    def test_radix_attention(self) -> None:
        random.seed(1)
        tree = radix_cache_server_kit.gen_radix_tree
        small = functools.partial(tree, num_nodes=12, chunk_len=12)
        with mock.patch.object(radix_cache_server_kit, "gen_radix_tree", small):
            radix_cache_server_kit.run_radix_attention_test(self.base_url)


class CacheHitMixin:
    """Three clients over three rounds: each turn finds the one before in the cache."""

    base_url: str

    def test_multiturn_cache_hit(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            dataset = Path(folder) / "conversations.json"
            dataset.write_text(json.dumps([_conversation(i) for i in range(9)]))
            run_multiturn_cache_hit_test(
                self.base_url,
                str(ensure_smollm2()),
                num_clients=3,
                num_rounds=3,
                request_length=48,
                output_length=8,
                dataset_path=str(dataset),
            )


def _conversation(number: int) -> dict[str, Any]:
    question = {"from": "human", "value": f"{number} boats left the harbour."}
    return {"conversations": [question, {"from": "gpt", "value": "And came back."}]}


KITS = {
    kit.__name__.removesuffix("Mixin"): kit
    for kit in (
        BasicAPIContractMixin,
        BasicDecodeCorrectnessMixin,
        BasicSchedulerStressMixin,
        PauseResumeInPlaceMixin,
        MatchedStopMixin,
        JSONConstrainedMixin,
        JSONModeMixin,
        RegexConstrainedMixin,
        EBNFConstrainedMixin,
        PrefixCacheBranchingMixin,
        RadixCacheServerMixin,
        CacheHitMixin,
        UnifiedRadixTreeTestMixin,
        AbortAllMixin,
        WaitingTimeoutMixin,
        RunningTimeoutTwoWaveMixin,
    )
}

# Stock SGLang with this model on this server does not pass these either.
FAIL_ON_STOCK = {
    "BasicDecodeCorrectness.test_basic_math": "the model cannot multiply",
    "BasicSchedulerStress.test_concurrent_requests": "the model knows no capitals here",
    "PrefixCacheBranching.test_prefix_cache_branching": "expects the cache of an SSM",
}
# These ask for something this server was not given.
NEED_MORE = {
    **dict.fromkeys(
        (
            "EBNFConstrained.test_ebnf_generate_custom_log_format",
            "RegexConstrained.test_regex_generate_custom_log_format",
        ),
        "a model that ends words: it samples, and a word without end is cut at the "
        "length limit; stock SGLang passes 8 and 9 of 12 times with this one",
    ),
    "EBNFConstrained.test_ebnf_generate_complex_json": "a model that writes all three "
    "fields, which the grammar leaves open; stock SGLang passes 8 of 12 times",
    "WaitingTimeout.test_waiting_timeout": "SGLANG_REQ_WAITING_TIMEOUT, one slot",
    "RunningTimeoutTwoWave.test_running_timeout_no_crash": "SGLANG_REQ_RUNNING_TIMEOUT",
    "UnifiedRadixTreeTest.test_gsm8k": "the GSM8K data set and a model that reasons",
}
# Ten seconds and more each, so not all of them are run here.
LONG = {
    "BasicSchedulerStress.test_long_prompt",
    "JSONConstrained.test_mix_json_and_other",
    "RadixCacheServer.test_radix_attention",
    "UnifiedRadixTreeTest.test_multiturn_logprobs_match",
    "UnifiedRadixTreeTest.test_multiturn_prefill_cache_hit_branching",
    "UnifiedRadixTreeTest.test_multiturn_decode_cache_hit_branching",
}

# The model ends a number or a word only where the grammar makes it.
ENDING_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{3,7}$"},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}


def all_tests() -> list[str]:
    """Names, `Kit.test`, of every test in the kits."""
    names = unittest.TestLoader().getTestCaseNames
    return [
        f"{name}.{test}"
        for name, kit in KITS.items()
        for test in names(type(name, (kit, unittest.TestCase), {}))
    ]


def run_kit_test(name: str, server: Server) -> None:
    """Run one of `all_tests()` against a server; raises what the test raises."""
    kit, test = name.split(".")
    bases = (KITS[kit], unittest.TestCase)
    case = type(kit, bases, _attributes(server))(test)
    case.debug()


def _attributes(server: Server) -> dict[str, Any]:
    """What the kits want their host class to have, and sizes a CPU can do."""
    numbers = random.Random(0)
    return {
        "base_url": server.url,
        "process": server.process,
        "model": "smollm2",
        "client": openai.Client(api_key="EMPTY", base_url=server.url + "/v1"),
        "flush_cache": staticmethod(server.flush),
        "cache_chunk_size": 64,
        "json_schema": json.dumps(ENDING_SCHEMA),
        "sanity_max_new_tokens_short": 24,
        "sanity_max_new_tokens_long": 48,
        "pause_num_requests": 3,
        "pause_max_new_tokens": 64,
        "pause_duration": 1,
        "pause_ignore_eos": True,
        "abort_all_num_requests": 8,
        "abort_all_max_new_tokens": 4000,
        "abort_all_sleep": 1,
        "input_ids": [[numbers.randint(1, 30000) for _ in range(64)] for _ in range(2)],
        "prefix_len": 32,
        "max_new_tokens": 8,
        "num_groups": 1,
        "branches_per_group": 2,
    }
