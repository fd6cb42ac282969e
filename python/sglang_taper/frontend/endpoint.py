"""The `sglang.lang` backend whose forks the server can recognise.

Importing this module wraps `StreamExecutor.fork`, the only place where a child meets
its parent; executors of other backends go straight to SGLang's own fork.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace
from sglang.lang.backend import runtime_endpoint
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

from sglang_taper.frontend.branch import Branch, with_branch
from sglang_taper.ids import new_rid
from sglang_taper.protocol import BranchMeta, parse_branch_meta

_ATTRIBUTE = "taper_branch"


class RuntimeEndpoint(runtime_endpoint.RuntimeEndpoint):
    """SGLang's RuntimeEndpoint plus branch metadata, SLOs and a request id.

    Use it as the backend of unchanged programs::

        sglang.set_default_backend(sglang_taper.RuntimeEndpoint("http://host:30000"))

    Each program is one request: its root, its forks and their nested forks share a
    group id. `join("concate_and_append")` appends the children's texts in order; the
    route that SGLang's own backend calls for it exists on no server.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        *,
        ttft_slo_ms: float | None = None,
        tpot_slo_ms: float | None = None,
        priority: float | None = None,
    ) -> None:
        """Ask the server at `base_url` for its model; one HTTP request.

        The SLOs (milliseconds) and the priority (a weight), each above 0, apply to
        every program of this backend; without them the server's defaults hold.
        Raises FieldError for an unacceptable value and RuntimeError when the server
        answers with an error.
        """
        self._targets = _targets(ttft_slo_ms, tpot_slo_ms, priority)
        super().__init__(base_url.rstrip("/"), api_key, verify, chat_template_name)
        self.support_concate_and_append = False

    def with_slo(
        self,
        *,
        ttft_slo_ms: float | None = None,
        tpot_slo_ms: float | None = None,
        priority: float | None = None,
    ) -> RuntimeEndpoint:
        """The same server with other targets, for single programs; no HTTP request.

        `program.run(..., backend=endpoint.with_slo(tpot_slo_ms=30))`. What is left out
        stays as it is. Raises FieldError for an unacceptable value.
        """
        given = _targets(ttft_slo_ms, tpot_slo_ms, priority)
        other = copy.copy(self)
        other._targets = replace(self._targets, **given.to_wire())
        return other

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        """The generated text and its `meta_info`; RuntimeError if refused."""
        text, meta_info = super().generate(s, sampling_params)
        self._note_cached(s, generated=text)
        return text, meta_info

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Pairs of new text and `meta_info`; RuntimeError if refused."""
        yield from super().generate_stream(s, sampling_params)
        # The interpreter has appended every chunk to the text by now.
        self._note_cached(s)

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """The likeliest choice, scored by requests of the asking branch."""
        decision = super().select(s, choices, temperature, choices_method)
        self._note_cached(s, generated=decision.decision)
        return decision

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Put the text of `s` into the server's radix tree when siblings gain by it.

        One request with `max_new_tokens=0`, or none if at most a few tokens are new.
        """
        if self._branch_of(s).worth_committing(len(s.text_), len(s.images_)):
            super().commit_lazy_operations(s)
            self._note_cached(s)

    def fork(self, s: StreamExecutor, size: int) -> list[Branch]:
        """The branches of a fork of `s`, whose prefix is committed if they share it.

        Raises FieldError when the server would not accept that many, or that deep.
        """
        if size > 1:
            self.commit_lazy_operations(s)
        return self._branch_of(s).fork(size)

    def _add_images(self, s: StreamExecutor, data: dict[str, Any]) -> None:
        # SGLang's backend calls this with the body of every request of a program
        # just before it sends it, so it is where a body can be completed.
        super()._add_images(s, data)
        branch = self._branch_of(s)
        prompt = data["text"] if "text" in data else data["input_ids"]
        if isinstance(prompt, str):
            data["rid"] = branch.last_rid = new_rid()
        else:  # the choices of a select, scored in one batch
            data["rid"] = [new_rid() for _ in prompt]
        data["sampling_params"] = with_branch(data["sampling_params"], branch.meta)

    def _branch_of(self, s: StreamExecutor) -> Branch:
        branch = getattr(s, _ATTRIBUTE, None)
        if branch is None:
            # setdefault: two threads may meet a new state at once.
            branch = vars(s).setdefault(_ATTRIBUTE, Branch.root(self._targets))
        return branch

    def _note_cached(self, s: StreamExecutor, generated: str = "") -> None:
        self._branch_of(s).cached(len(s.text_) + len(generated), len(s.images_))


def _targets(
    ttft_slo_ms: float | None, tpot_slo_ms: float | None, priority: float | None
) -> BranchMeta:
    given = {
        "ttft_slo_ms": ttft_slo_ms,
        "tpot_slo_ms": tpot_slo_ms,
        "priority": priority,
    }
    return parse_branch_meta(given, "RuntimeEndpoint")


_stock_fork = StreamExecutor.fork


@functools.wraps(_stock_fork)
def _fork(
    self: StreamExecutor,
    size: int = 1,
    position_ids_offset: list[int] | None = None,
) -> list[StreamExecutor]:
    if not isinstance(self.backend, RuntimeEndpoint):
        return _stock_fork(self, size, position_ids_offset)
    # SGLang looks at the text before its worker thread has written it, and so seldom
    # commits the prefix: wait, commit, then fork one by one, which never commits.
    self.sync()
    branches = self.backend.fork(self, int(size)) if size > 0 else []
    children = [_stock_fork(self, 1, position_ids_offset)[0] for _ in branches]
    for child, branch in zip(children, branches, strict=True):
        setattr(child, _ATTRIBUTE, branch)
    return children


StreamExecutor.fork = _fork
