"""Modes we would break are refused with their reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_taper.engine.refusals import REFUSALS, refused

NOTHING_ON = SimpleNamespace(
    disaggregation_mode="null",
    enable_pdmux=False,
    pp_size=1,
    attn_dp_size=1,
    enable_dp_attention=False,
    enable_mixed_chunk=False,
    dllm_algorithm=None,
    speculative_algorithm=None,
)

ON = {
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--enable-pdmux": {"enable_pdmux": True},
    "--pp-size": {"pp_size": 2},
    "--attn-dp-size": {"attn_dp_size": 2},
    "--enable-mixed-chunk": {"enable_mixed_chunk": True},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--tokenizer-worker-num": {"tokenizer_worker_num": 2, "admin_api_key": "k"},
    "--speculative-algorithm": {"speculative_algorithm": "NGRAM"},
}


def test_an_ordinary_server_is_not_refused() -> None:
    assert list(refused(NOTHING_ON)) == []


def test_every_refusal_has_a_case_here() -> None:
    assert set(ON) == {refusal.flag for refusal in REFUSALS}


@pytest.mark.parametrize("flag", ON)
def test_a_refusal_names_the_flag_and_the_way_out(flag: str) -> None:
    args: Any = SimpleNamespace(**{**vars(NOTHING_ON), **ON[flag]})
    (error,) = refused(args)
    assert str(error).startswith(flag + "=")
    assert "--branch-policy none" in str(error)


def test_attention_data_parallelism_is_seen_by_its_old_flag_too() -> None:
    args = SimpleNamespace(**{**vars(NOTHING_ON), "enable_dp_attention": True})
    assert [error.field for error in refused(args)] == ["--attn-dp-size"]


def test_several_workers_are_refused_with_a_key_which_is_not_shown() -> None:
    workers = {**vars(NOTHING_ON), "tokenizer_worker_num": 2}
    (error,) = refused(SimpleNamespace(**workers, api_key="hidden"))
    assert "hidden" not in str(error)
    assert list(refused(SimpleNamespace(**workers))) == []
    one = {**workers, "tokenizer_worker_num": 1}
    assert list(refused(SimpleNamespace(**one, admin_api_key="k"))) == []


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_the_rust_server_is_refused(value: str) -> None:
    assert [e.field for e in refused(NOTHING_ON, value)] == ["SGLANG_RUST_SERVER"]


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_the_rust_server_may_be_off(value: str) -> None:
    assert list(refused(NOTHING_ON, value)) == []
