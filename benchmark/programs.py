"""Forking programs written against `sglang.lang`, as a workload or one by one.

    python benchmark/programs.py --base-url URL [NAME ...]
    python benchmark/goodput.py --programs tree,chains,skeleton,judge,chat ...

They run through `sglang_taper.RuntimeEndpoint`, so a server with a branch policy
recognises their forks. How many tokens each part gets is drawn beforehand and asked
for exactly, so that every policy gets the same work; the text is the model's.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sglang as sgl
from goodput_lib.recording import RecordingEndpoint

TEMPERATURE = 0.8
SUBJECTS = (
    "a bridge that sways in the wind",
    "sharing water between two villages",
    "a library that has run out of shelves",
    "planning a night train",
    "why the bread does not rise",
    "a clock that loses ten minutes a day",
    "moving an orchestra across the sea",
    "teaching a parrot to keep a secret",
)
VIEWPOINTS = ("clarity", "evidence", "order", "tone", "length", "novelty")
SUM_TASK = "A shop has {a} boxes of {b} pens and sells {c} pens. How many are left?"


@dataclass(frozen=True)
class Work:
    """One program to run: its name, its subject and how much it writes."""

    name: str
    subject: str
    fan_out: int
    part_tokens: tuple[int, ...]
    closing_tokens: int


def _write(name: str, num_tokens: int) -> Any:
    return sgl.gen(
        name, max_tokens=num_tokens, ignore_eos=True, temperature=TEMPERATURE
    )


@sgl.function
def tree(s: Any, work: Work) -> None:
    """Tree of thought: plans, answers to each plan, then a choice among all of them."""
    s += f"Problem: {work.subject}. What can be done?\nFirst thoughts:"
    s += _write("thoughts", work.closing_tokens)
    plans = s.fork(max(2, work.fan_out // 2))
    answers = []
    for number, plan in enumerate(plans):
        plan += f"\nPlan {number + 1}:"
        plan += _write("plan", work.part_tokens[number])
        for leaf_number, leaf in enumerate(plan.fork(2)):
            leaf += f"\nCarried out, way {leaf_number + 1}:"
            leaf += _write("answer", work.part_tokens[-1 - number])
            answers.append(leaf)
    for number, answer in enumerate(answers):
        s += f"\nAnswer {number + 1}: {answer['answer']}"
    s += "\nThe best of these is"
    s += _write("choice", work.closing_tokens)


@sgl.function
def chains(s: Any, work: Work) -> None:
    """Several chains of reasoning about one question, and a vote among them."""
    s += f"Question: {work.subject}\nLet us reason about it.\nRestated:"
    s += _write("restated", work.closing_tokens)
    branches = s.fork(work.fan_out)
    for number, branch in enumerate(branches):
        branch += f"\nChain {number + 1}, step by step:"
        branch += _write("chain", work.part_tokens[number])
    for number, branch in enumerate(branches):
        s += f"\nChain {number + 1} says: {branch['chain']}"
    s += "\nMost chains agree that the answer is"
    s += _write("vote", work.closing_tokens)


@sgl.function
def skeleton(s: Any, work: Work) -> None:
    """An outline, all its points written out at the same time, and an ending."""
    s += f"An article about {work.subject}.\nOutline: 1."
    s += _write("outline", work.closing_tokens)
    branches = s.fork(work.fan_out)
    for number, branch in enumerate(branches):
        branch += f"\n\nPoint {number + 1} in full:"
        branch += _write("point", work.part_tokens[number])
    for number, branch in enumerate(branches):
        s += f"\n\n{number + 1}. {branch['point']}"
    s += "\n\nIn short,"
    s += _write("ending", work.closing_tokens)


@sgl.function
def judge(s: Any, work: Work) -> None:
    """An essay judged from several viewpoints at once, and a verdict."""
    s += f"Essay on {work.subject}:"
    s += _write("essay", 2 * work.closing_tokens)
    viewpoints = VIEWPOINTS[: work.fan_out]
    branches = s.fork(len(viewpoints))
    for number, (branch, viewpoint) in enumerate(
        zip(branches, viewpoints, strict=True)
    ):
        branch += f"\nIts {viewpoint}, judged in a few words:"
        branch += _write("judgement", work.part_tokens[number])
    for viewpoint, branch in zip(viewpoints, branches, strict=True):
        s += f"\n{viewpoint}: {branch['judgement']}"
    s += "\nAll in all:"
    s += _write("verdict", work.closing_tokens)


@sgl.function
def chat(s: Any, work: Work) -> None:
    """No fork: a serial answer among the others."""
    s += f"Somebody asks about {work.subject}. The answer:"
    s += _write("answer", work.part_tokens[0])


PROGRAMS: dict[str, Any] = {
    program.func.__name__: program for program in (tree, chains, skeleton, judge, chat)
}
MAX_FAN_OUT = 6


def draw_work(names: Sequence[str], rng: random.Random, mean_tokens: float) -> Work:
    """One program of `names` with lengths around `mean_tokens`; `rng` is advanced."""
    name = rng.choice(list(names))
    subject = rng.choice(SUBJECTS)
    if name == "chains":
        a, b = rng.randint(2, 9), rng.randint(5, 30)
        subject = SUM_TASK.format(a=a, b=b, c=rng.randint(1, a * b))
    low, high = max(2, int(0.5 * mean_tokens)), max(3, int(1.5 * mean_tokens))
    return Work(
        name=name,
        subject=subject,
        fan_out=rng.randint(3, MAX_FAN_OUT),
        part_tokens=tuple(rng.randint(low, high) for _ in range(MAX_FAN_OUT)),
        closing_tokens=max(2, int(0.3 * mean_tokens)),
    )


def run_program(work: Work, endpoint: RecordingEndpoint) -> str:
    """Run it to its end and return its text; raises what went wrong in it."""
    state = PROGRAMS[work.name].run(work=work, backend=endpoint)
    text: str = state.text()
    if (error := state.error()) is not None:
        raise error
    return text


def main(argv: Sequence[str] | None = None, show: Callable[..., None] = print) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--tokens", type=float, default=24, help="mean of a part")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    args = parser.parse_args(argv)
    endpoint = RecordingEndpoint(args.base_url)
    for name in args.names or PROGRAMS:
        if name not in PROGRAMS:
            parser.error(f"no program {name!r}: known are {', '.join(PROGRAMS)}")
        recording = endpoint.recording()
        text = run_program(draw_work([name], random.Random(0), args.tokens), recording)
        show(f"--- {name}: {recording.shape().phases}\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
