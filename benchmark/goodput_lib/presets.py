"""Everything a result needs, by name: each preset is a command line.

What is given beside `--preset` wins over it. Where the numbers come from is in
docs/benchmark.md.
"""

from __future__ import annotations

import shlex

_ALL_POLICIES = (
    "off,eager,cap:2,taper:deadline=progress,rho=0.8,"
    "taper:deadline=progress,rho=0.5,taper,ledger"
)
_CPU_SERVER = "--max-total-tokens 24576 --max-running-requests 64"
# Short on purpose: on a CPU, attention over a long context costs more than the rows.
_CPU_SHAPES = "--prompt-tokens 60 --serial-tokens 40 --decomposable-factor 3"
_MIXED = "--pdr 0.5 --pts 0.8 --fan-out 2-12 --stages 1-3"
# One boot serves both h200 presets. Weights are random, so nothing is detokenised.
_H200_SERVER = (
    "--dtype bfloat16 --load-format dummy --skip-tokenizer-init "
    "--mem-fraction-static 0.9 --chunked-prefill-size 8192 "
    "--max-running-requests 256 --cuda-graph-max-bs-decode 256"
)
_H200_SHAPES = "--prompt-tokens 60 --serial-tokens 200 --decomposable-factor 3"

PRESETS: dict[str, str] = {
    # The TPOT at which eager misses and one row each does not. Simulated with the step
    # costs of a quiet run, twelve at a time make that window wide enough, six do not.
    "cpu-contested": f"""
        --policies off,eager,cap:2,taper:deadline=progress,rho=0.8,taper,ledger
        --rounds 3 --num-prompts 60 --arrivals closed:12
        {_CPU_SHAPES} {_MIXED} --goodput ttft:3000 --slo-procedure
        --server-flags '{_CPU_SERVER}'""",
    # Rows are limited: what a policy does with waiting requests.
    "cpu-slots": f"""
        --policies {_ALL_POLICIES} --rounds 3 --num-prompts 60 --arrivals poisson
        --rate-x 0.6,0.8,1.0,1.2,1.5,1.8,2.2 --measure-concurrency 16
        {_CPU_SHAPES} --pdr 0.5 --pts 0.8 --fan-out 6-12 --stages 1-3
        --goodput ttft:3000 --slo-procedure --tpot-x 1.5
        --server-flags '--max-total-tokens 24576 --max-running-requests 16'""",
    # The corner of the paper's headline: steps that cost nearly the same for any width.
    # Simulated: taper serves 1.9 to 2.1 times the goodput of off here.
    "cpu-headline": """
        --policies off,eager,taper,ledger --rounds 3 --num-prompts 48
        --arrivals closed:8 --pdr 0.35 --pts 0.98 --fan-out 12-16 --stages 1-1
        --prompt-tokens 60 --serial-tokens 30 --decomposable-factor 5
        --goodput ttft:6000 --slo-procedure --tpot-x 1.15,1.2,1.3
        --test-step-cost-ms 400
        --server-flags '--max-total-tokens 32768 --max-running-requests 128'""",
    # As a system: long prefixes, on our server and on stock SGLang side by side.
    "cpu-vs-stock": """
        --policies stock,off,eager,ledger --rounds 3 --num-prompts 16
        --arrivals closed:2 --pdr 1 --pts 0.9 --fan-out 8-8 --stages 1-1
        --prompt-tokens 2000 --clip-prompt 1024-4096 --serial-tokens 40
        --decomposable-factor 3 --branch-own-tokens 8
        --goodput ttft:20000 --slo-procedure --tpot-x 1.3,2.0,3.0
        --server-flags '--max-total-tokens 49152 --max-running-requests 32'""",
    # Nothing is scarce: no policy may lose here.
    "low-load": f"""
        --policies {_ALL_POLICIES} --rounds 3 --num-prompts 40 --arrivals poisson
        --rate-x 0.3 --measure-concurrency 6 {_CPU_SHAPES} {_MIXED}
        --goodput ttft:3000 --slo-procedure --tpot-x 2.0
        --server-flags '{_CPU_SERVER}'""",
    "h200-closed": f"""
        --policies off,eager,cap:2,taper,ledger --rounds 1 --num-prompts 320
        --arrivals closed:64 {_H200_SHAPES} {_MIXED} --goodput ttft:2000
        --slo-procedure --tpot-x 1.2,1.35 --server-flags '{_H200_SERVER}'""",
    "h200-slots": f"""
        --policies off,eager,ledger --rounds 1 --num-prompts 240 --arrivals poisson
        --rate-x 1.0,1.4 --measure-concurrency 96 {_H200_SHAPES}
        --pdr 0.5 --pts 0.8 --fan-out 6-12 --stages 1-3 --goodput ttft:2000
        --slo-procedure --tpot-x 1.5 --server-flags '{_H200_SERVER}'""",
}


def preset_flags(name: str) -> list[str]:
    """The command line of a preset, without its server flags' own parsing."""
    return shlex.split(PRESETS[name])
