"""Puts `meta_info["taper"]` on the last answer of every grouped request."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import (
    SchedulerOutputStreamer,
)

from sglang_taper.engine.controller import BranchController
from sglang_taper.engine.report import describe_branch
from sglang_taper.protocol import META_INFO_KEY


class TaperOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer with its own place for additional information in use."""

    has_additional_customized_info = True
    controller: BranchController

    def stream_output(self, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
        # SGLang calls this once the results of a whole batch are in its requests.
        self.controller.committed(reqs)
        super().stream_output(reqs, *args, **kwargs)

    def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
        """One list per request: `[description]` for a finished branch, else `[]`."""
        described = [self._describe(req) for req in reqs]
        return {META_INFO_KEY: described} if any(described) else {}

    def _describe(self, req: Any) -> list[dict[str, Any]]:
        branch = getattr(req, "taper", None)
        if branch is None or branch.group is None or not req.finished():
            return []
        return [describe_branch(branch, self.controller.params.policy)]
