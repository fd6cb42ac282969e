"""Forks that the model writes itself, as ThreadWeaver tags (arXiv 2512.07843).

    <Parallel>
    <Outlines>
    <Outline> 1: first way</Outline>
    <Outline> 2: second way</Outline>
    </Outlines>
    <Thread>
    1: ...</Thread><Thread>
    2: ...</Thread>
    </Parallel>

`</Outlines>` opens one branch per outline, `</Thread>` or the end of generation closes
it, and the model goes on after all threads in order. Token ids are joined as they were
generated, so positions are plain sequential ones.
"""

from __future__ import annotations

import re

from sglang_taper.front_ends.types import Part, Piece, Program, Prompt, Said

OPEN, CLOSE = "<Outlines>", "</Outlines>"
END_OF_THREAD = "</Thread>"
MAX_STAGES = 32  # as in the published client
MAX_THREADS = 32
_OUTLINE = re.compile(r"<Outline>\s*(\d+(?:\.\d+)*)\s*:")
# The tags are special tokens where a model was trained on them.
_SHOW_TAGS = {"skip_special_tokens": False}


class ThreadWeaver:
    """Outlines open threads; text that is not well formed is served as it is.

    Plain text, which the model simply continues: `</Outlines>` that closes nothing,
    no outline in it, or more than 32 different labels. An unclosed `<Outlines>` or a
    tag inside a thread is text as well. Equal labels are one thread. After 32 stages
    nothing forks any more.
    """

    def run(self, prompt: Prompt) -> Program:
        context: tuple[Piece, ...] = ()
        text = prompt.text
        for _ in range(MAX_STAGES):
            (said,) = yield [_serial(context, (CLOSE,))]
            context, text = (*context, *said.pieces), text + said.text
            if said.stopped_by is None:
                return
            labels = outline_labels(text)
            if labels:
                threads = yield [_thread(context, i, n) for i, n in enumerate(labels)]
                context, text = _joined(context, text, labels, threads)
        yield [_serial(context, ())]


def outline_labels(text: str) -> tuple[str, ...]:
    """Labels of the outline block that ends `text`; empty where it is no valid one.

    Distinct, in order of their first outline.
    """
    _, tag, block = text.rpartition(OPEN)
    body, _, rest = block.partition(CLOSE)
    if not tag or rest or END_OF_THREAD in body:
        return ()
    labels = tuple(dict.fromkeys(_OUTLINE.findall(body)))
    return labels if len(labels) <= MAX_THREADS else ()


def _serial(context: tuple[Piece, ...], stop: tuple[str, ...]) -> Part:
    # The line break after the threads is in the context of what follows them.
    lead = context[-1] if context and isinstance(context[-1], str) else ""
    return Part(context, stop, lead=lead, sampling_params=_SHOW_TAGS)


def _header(index: int, label: str) -> str:
    return f"{'' if index else chr(10)}<Thread>\n{label}:"


def _thread(context: tuple[Piece, ...], index: int, label: str) -> Part:
    return Part(
        prompt=(*context, _header(0, label)),
        stop=(END_OF_THREAD,),
        lead=_header(index, label),
        tail="\n" + END_OF_THREAD,
        sampling_params=_SHOW_TAGS,
    )


def _joined(
    context: tuple[Piece, ...], text: str, labels: tuple[str, ...], threads: list[Said]
) -> tuple[tuple[Piece, ...], str]:
    """Context and text after all threads, in the order of their outlines."""
    for index, (label, said) in enumerate(zip(labels, threads, strict=True)):
        header = _header(index, label)
        context = (*context, header, *said.pieces)
        text += header + said.text + said.tail
    return (*context, "\n"), text + "\n"
