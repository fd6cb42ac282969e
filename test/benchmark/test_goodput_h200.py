"""The script for one Hopper GPU, as far as a machine without one can tell."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from goodput_lib.options import Options
from goodput_lib.presets import PRESETS

from sglang_taper.config import add_flags
from sglang_taper.policy.types import PolicyParams

# SGLang is imported for its command line, which takes seconds.
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmark" / "h200_qwen3_32b.sh"


@pytest.fixture(scope="module")
def server_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    if not any("--branch-policy" in a.option_strings for a in parser._actions):
        add_flags(parser)
    return parser


@pytest.mark.parametrize("preset", PRESETS)
def test_sglang_knows_the_server_flags_of_a_preset(
    server_parser: argparse.ArgumentParser, preset: str
) -> None:
    flags = Options.from_argv(["--preset", preset]).server_flags
    args = server_parser.parse_args(["--model-path", "m", *flags])
    assert args.max_running_requests > 0


def test_both_presets_can_share_one_server() -> None:
    closed, slots = (
        Options.from_argv(["--preset", name]).server_flags
        for name in ("h200-closed", "h200-slots")
    )
    assert closed == slots


def test_the_script_is_valid_and_its_commands_have_flags_that_exist(
    tmp_path: Path, server_parser: argparse.ArgumentParser
) -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    done = subprocess.run(
        ["bash", SCRIPT, "--dry-run", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    server, closed, slots, report = map(shlex.split, done.stdout.splitlines())
    assert server[1:3] == ["-m", "sglang_taper.launch_server"]
    args = server_parser.parse_args(server[3:])
    assert args.load_format == "dummy"
    assert args.incremental_streaming_output
    for command, preset in ((closed, "h200-closed"), (slots, "h200-slots")):
        options = Options.from_argv(command[2:])
        assert options.args.preset == preset
        assert options.args.base_url.endswith(str(args.port))
        assert options.slos_ms["ttft"] == PolicyParams().ttft_slo_ms
    assert report[1].endswith("report.py")


def test_the_model_has_the_size_of_qwen3_32b(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", SCRIPT, "--dry-run", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        check=True,
    )
    c = json.loads((tmp_path / "model" / "config.json").read_text())
    attention = c["hidden_size"] * c["head_dim"] * 2
    attention *= c["num_attention_heads"] + c["num_key_value_heads"]
    layer = attention + 3 * c["hidden_size"] * c["intermediate_size"]
    embeddings = 2 * c["vocab_size"] * c["hidden_size"]
    assert 32.7e9 < c["num_hidden_layers"] * layer + embeddings < 32.8e9
