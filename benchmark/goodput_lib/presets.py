"""Everything a result needs, by name: each preset is a command line.

What is given beside `--preset` wins over it. Where the numbers come from is in
docs/benchmark.md.
"""

from __future__ import annotations

import shlex

_CPU_SERVER = "--max-total-tokens 24576 --max-running-requests 64"
# Short on purpose: on a CPU, prefills and long contexts cost more than the rows.
_CPU_SHAPES = "--prompt-tokens 24 --serial-tokens 40 --decomposable-factor 3"
_STAGES = "--pdr 0.5 --pts 0.8 --stages 1-3"
_MIXED = f"{_STAGES} --fan-out 4-12"
# One boot serves both h200 presets. Weights are random, so nothing is detokenised.
_H200_SERVER = (
    "--dtype bfloat16 --load-format dummy --skip-tokenizer-init "
    "--mem-fraction-static 0.9 --chunked-prefill-size 8192 "
    "--max-running-requests 256 --cuda-graph-max-bs-decode 256"
)
_H200_SHAPES = "--prompt-tokens 60 --serial-tokens 200 --decomposable-factor 3"

PRESETS: dict[str, str] = {
    # The TPOT at which eager misses and one row each does not. Fan-outs from four on:
    # with smaller ones eager's mean is below 1.3 times what off needs.
    "cpu-contested": f"""
        --policies off,eager,taper:deadline=progress,rho=0.5,taper,ledger
        --rounds 3 --num-prompts 60 --arrivals closed:8
        {_CPU_SHAPES} {_MIXED} --goodput ttft:3000 --slo-procedure --tpot-x 1.3,1.4
        --server-flags '{_CPU_SERVER}'""",
    # Rows are limited: what a policy does with waiting requests. A loop of four is one
    # in which `off` does not yet queue.
    "cpu-slots": f"""
        --policies off,eager,taper,ledger --rounds 3 --num-prompts 60
        --arrivals poisson --rate-x 0.5,0.8,1.7,2.0,2.3 --measure-concurrency 4
        {_CPU_SHAPES} {_STAGES} --fan-out 6-12
        --goodput ttft:3000 --slo-procedure --tpot-x 1.5
        --server-flags '--max-total-tokens 24576 --max-running-requests 16'""",
    # The corner of the paper's headline: steps that cost nearly the same for any width.
    "cpu-headline": """
        --policies off,eager,taper,ledger --rounds 3 --num-prompts 48
        --arrivals closed:8 --pdr 0.35 --pts 0.98 --fan-out 16-20 --stages 1-1
        --prompt-tokens 24 --serial-tokens 20 --decomposable-factor 6
        --goodput ttft:6000 --slo-procedure --tpot-x 1.35
        --test-step-cost-ms 300
        --server-flags '--max-total-tokens 32768 --max-running-requests 128'""",
    # As a system: long prefixes, on our server and on stock SGLang side by side.
    "cpu-vs-stock": """
        --policies stock,off,eager,taper,ledger --rounds 3 --num-prompts 10
        --arrivals closed:2 --pdr 1 --pts 0.9 --fan-out 8-8 --stages 1-1
        --prompt-tokens 2000 --clip-prompt 1024-4096 --serial-tokens 40
        --decomposable-factor 10 --branch-own-tokens 8
        --goodput ttft:20000 --slo-procedure --tpot-x 1.3
        --server-flags '--max-total-tokens 49152 --max-running-requests 32'""",
    # Nothing is scarce: no policy may lose here.
    "low-load": f"""
        --policies off,eager,taper,ledger --rounds 3 --num-prompts 40 --arrivals poisson
        --rate-x 0.3 --measure-concurrency 6 {_CPU_SHAPES} {_MIXED}
        --goodput ttft:3000 --slo-procedure --tpot-x 2.0
        --server-flags '{_CPU_SERVER}'""",
    "h200-closed": f"""
        --policies off,eager,cap:2,taper,ledger --rounds 1 --num-prompts 320
        --arrivals closed:64 {_H200_SHAPES} {_STAGES} --fan-out 2-12
        --goodput ttft:2000 --slo-procedure --tpot-x 1.2,1.35
        --server-flags '{_H200_SERVER}'""",
    "h200-slots": f"""
        --policies off,eager,ledger --rounds 1 --num-prompts 240 --arrivals poisson
        --rate-x 1.0,1.4 --measure-concurrency 96 {_H200_SHAPES}
        {_STAGES} --fan-out 6-12 --goodput ttft:2000
        --slo-procedure --tpot-x 1.5 --server-flags '{_H200_SERVER}'""",
}


def preset_flags(name: str) -> list[str]:
    """The command line of a preset, without its server flags' own parsing."""
    return shlex.split(PRESETS[name])
