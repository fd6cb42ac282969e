from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_taper import cli
from sglang_taper.demo.options import DemoOptions


def options(*argv: str) -> DemoOptions:
    return DemoOptions.from_args(cli._parser().parse_args(["demo", *argv]))


def test_without_flags_the_options_are_their_own_defaults() -> None:
    assert options() == DemoOptions()


def test_flags_after_two_dashes_go_to_the_server() -> None:
    parsed = options("--quick", "--", "--dtype", "float32")
    assert parsed.quick
    assert parsed.server_flags == ("--dtype", "float32")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--rounds", "0"], "--rounds=0"),
        (["--tpot-slo-ms", "-1"], "--tpot-slo-ms=-1"),
        (["--tpot-slo-factor", "nan"], "--tpot-slo-factor=nan"),
        (["--ttft-slo-ms", "0"], "--ttft-slo-ms=0"),
        (["--url", "http://x", "--", "--dtype", "float32"], "--dtype float32"),
    ],
)
def test_a_bad_flag_is_named_and_ends_the_command_with_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *argv]) == 2
    assert named in capsys.readouterr().err


def test_help_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys\nfrom sglang_taper import cli\n"
        "try: cli.main(['demo', '--help'])\n"
        "except SystemExit: print({'torch', 'sglang', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
