"""SGLang's prefill admission, with a second way to start what it admits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class ForkPrefillAdder(PrefillAdder):
    """Admits by SGLang's own budgets; `take` may take an admitted request away from
    the prefill batch because it starts without a prefill."""

    rem_input_tokens: int
    rem_chunk_tokens: int | None

    def __init__(self, take: Callable[[Req], bool], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take = take

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        num_admitted = len(self.can_run_list)
        budgets = self.rem_input_tokens, self.rem_chunk_tokens
        verdict: AddReqResult = super().add_one_req(req, *args, **kwargs)
        is_admitted = len(self.can_run_list) > num_admitted
        if not is_admitted or self.new_chunked_req is req or not self._take(req):
            return verdict
        self.can_run_list.pop()
        # It computes nothing in the prefill, so it uses up none of its tokens.
        self.rem_input_tokens, self.rem_chunk_tokens = budgets
        verdict = self.budget_state()
        return verdict
