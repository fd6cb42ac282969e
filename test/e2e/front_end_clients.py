"""Programs of front ends as their clients run them: plain requests, joined by id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from server import Server
from sglang_taper.front_ends.skeleton import OUTLINE_LEAD, outline_grammar
from sglang_taper.models import resolve_model_path

# Front ends of a test's own.
SOURCE = """
from sglang_taper.front_ends.types import Part


class Endless:
    def run(self, prompt):
        yield [Part(("One",)), Part(("Two",))]


class Broken:
    def run(self, prompt):
        yield None
"""


class Said(NamedTuple):
    """One answer: without the token that ended it, which counts all the same."""

    text: str
    ids: list[int]
    is_stopped: bool
    num_tokens: int


class Client:
    """Sends plain requests of token ids; keeps text and ids of the answer."""

    def __init__(self, server: Server, prompt: str, max_new_tokens: int) -> None:
        self._server, self._left = server, max_new_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(str(model_folder()))
        self.prompt = list(self.tokenizer(prompt)["input_ids"])
        self.ids: list[int] = []
        self.text = ""

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def generate(self, ids: list[int], **params: Any) -> Said:
        bound = params.pop("max_new_tokens", self._left)
        sampling = {
            "temperature": 0,
            "no_stop_trim": True,
            "max_new_tokens": min(bound, self._left),
            **params,
        }
        body = {"input_ids": [*self.prompt, *ids], "sampling_params": sampling}
        answer = self._server.generate(body)
        ends = tuple(params["stop"])
        matched = answer["meta_info"]["finish_reason"].get("matched")
        said = answer["output_ids"]
        if isinstance(matched, int):
            end = self.tokenizer.decode([matched])
            text = answer["text"].removesuffix(end)
            return Said(text, said[:-1], text.endswith(ends), len(said))
        return Said(answer["text"], said, answer["text"].endswith(ends), len(said))

    def spend(self, answers: Sequence[Said]) -> bool:
        """Take the longest of them off the bound; whether tokens are left."""
        self._left -= max(said.num_tokens for said in answers)
        return self._left > 0

    def say(self, text: str, ids: list[int] | None = None) -> None:
        self.text += text
        self.ids += self.encode(text) if ids is None else ids

    def threadweaver(self) -> None:
        tags = {"skip_special_tokens": False}
        said = self.generate([], **tags, stop=["</Outlines>"])
        self.say(said.text, said.ids)
        while said.is_stopped and self.spend([said]) and self.threads(tags):
            said = self.generate(self.ids, **tags, stop=["</Outlines>"])
            self.say(said.text, said.ids)

    def threads(self, tags: dict[str, Any]) -> bool:
        """The block that has just been opened, and whether tokens are left."""
        block = (self.tokenizer.decode(self.prompt) + self.text).split("<Outlines>")[-1]
        labels = list(dict.fromkeys(re.findall(r"<Outline>\s*([\d.]+)\s*:", block)))
        prefixes = [[*self.ids, *self.encode(f"\n<Thread>\n{n}:")] for n in labels]
        params = {**tags, "stop": ["</Thread>"]}
        with ThreadPoolExecutor() as pool:
            threads = list(pool.map(lambda ids: self.generate(ids, **params), prefixes))
        for i, (label, thread) in enumerate(zip(labels, threads, strict=True)):
            self.say(("" if i else "\n") + f"<Thread>\n{label}:")
            self.say(thread.text, thread.ids)
            if not thread.is_stopped:
                self.say("\n</Thread>")
        if not self.spend(threads):
            return False
        self.say("\n")
        return True

    def skeleton(self) -> None:
        asked = self.encode(OUTLINE_LEAD)
        bound = min(192, self._left // 2)
        outline = self.generate(
            asked, regex=outline_grammar(), max_new_tokens=bound, stop=["\n\n"]
        )
        self.spend([outline])
        context = [*asked, *outline.ids]
        if not outline.is_stopped:
            context += self.encode("\n\n")
        titles = re.findall(r"^\d+\. *(\S.*?) *$", "1." + outline.text, re.M)
        leads = [f"{i}. {t}:" for i, t in enumerate(dict.fromkeys(titles), 1)]
        for lead in leads:
            said = self.generate([*context, *self.encode(lead)], stop=["\n"])
            self.say(lead)
            self.say(said.text, said.ids)
            if not said.is_stopped:
                self.say("\n")


def model_folder() -> Path:
    return Path(resolve_model_path("smollm2"))
