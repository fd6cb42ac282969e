"""Which plan and which graph a decode step gets, on a backend that only takes notes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_taper.engine.attention.gate import StepGate
from sglang_taper.engine.attention.prefixes import Member
from sglang_taper.engine.attention.shared_decode import (
    PLAIN,
    SHARED,
    SharedDecode,
    graph_variants_hook,
)
from sglang_taper.engine.attention.shared_steps import SharedSteps
from sglang_taper.engine.attention.use import describe_attention, shared_prefix_backend
from sglang_taper.ops.segments import Segment

PREFIX = 100
MAX_GRAPH_ROWS = 8


class Group:
    num_live = 4


class KnownSlots:
    """Every row has the same prefix, then slots of its own."""

    pending = False
    num_passes = 0

    def __call__(self, member: Member) -> np.ndarray:
        own = 1000 * (1 + member.row) + np.arange(member.num_tokens - PREFIX)
        return np.concatenate([np.arange(PREFIX), own]).astype(np.int32)

    def passed(self) -> None:
        self.num_passes += 1


class NotingDecoder:
    """Serves from 2 to 8 rows, and steps of up to 1,000 tokens."""

    name, measured_as = "noting", "noting"

    def usable(self, segments: Any, num_rows: int) -> tuple[Segment, ...]:
        return tuple(segments)

    def fits(self, segments: Any, seq_lens: Any) -> bool:
        return sum(seq_lens) <= 1000

    def prepare(self, num_rows: int) -> bool:
        return 2 <= num_rows <= MAX_GRAPH_ROWS

    def plan(
        self, segments: Any, seq_lens: Any, rows: Any, lens: Any, in_graph: bool
    ) -> Any:
        assert len(rows) == len(lens) == len(seq_lens)
        return ("shared", tuple(segments), tuple(seq_lens), in_graph)


class NotingBackend:
    """SGLang's side: what it would have planned."""

    def __init__(self) -> None:
        self.forward_metadata: Any = None
        self.decode_cuda_graph_metadata: dict[int, Any] = {}

    def init_forward_metadata(self, batch: Any) -> None:
        self.forward_metadata = ("plain", batch.batch_size)

    def init_forward_metadata_out_graph(
        self, batch: Any, in_capture: bool = False
    ) -> None:
        if in_capture:
            made = len(self.decode_cuda_graph_metadata)
            self.decode_cuda_graph_metadata[batch.batch_size] = f"wrapper {made}"
        self.forward_metadata = ("plain", batch.batch_size)


class Backend(SharedDecode, NotingBackend):
    shared_prefix_attention = "noting"

    def make_metadata(self, wrappers: Any) -> Any:
        return wrappers


@pytest.fixture
def backend() -> Backend:
    made = Backend()
    decoder: Any = NotingDecoder()
    read: Any = KnownSlots()
    made.share_prefixes(SharedSteps(StepGate(True), decoder, read), decoder)
    return made


def make_reqs(*rows: int) -> list[Any]:
    group = Group()
    return [
        SimpleNamespace(
            taper=SimpleNamespace(group=group, ended=False),
            kv=SimpleNamespace(req_pool_idx=row),
            retraction_count=0,
        )
        for row in rows
    ]


def batch_of(lens: list[int], rows: Any, mode: Any = ForwardMode.DECODE) -> Any:
    """As SGLang copies a batch: only `kv_loc_plan` still has the scheduler's tensor."""
    return SimpleNamespace(
        batch_size=len(lens),
        forward_mode=mode,
        req_pool_indices=torch.zeros(len(lens), dtype=torch.long),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        kv_loc_plan=SimpleNamespace(req_pool_indices=rows),
    )


def announced(backend: Backend, lens: list[int]) -> Any:
    """A decode step whose rows all share the prefix."""
    rows = torch.arange(len(lens))
    backend.announce(make_reqs(*rows.tolist()), rows, lens)
    return batch_of(lens, rows)


def capture(backend: Backend, *sizes: int) -> None:
    """As SGLang captures: largest first, both variants of a size in a row."""
    for size in sorted(sizes, reverse=True):
        for label in (PLAIN, SHARED):
            capture_mode._set_capture_attention_variant(label)
            batch = batch_of([1] * size, torch.zeros(size))
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
    capture_mode._set_capture_attention_variant(None)


def test_an_eager_step_that_shares_is_planned_by_us(backend: Backend) -> None:
    batch = announced(backend, [110, 120, 130])
    backend.init_forward_metadata(batch)
    segments = (Segment((0, 1, 2), 0, PREFIX),)
    assert backend.forward_metadata == [("shared", segments, (110, 120, 130), False)]


def test_a_replay_plans_padding_rows_behind_the_announced_ones(
    backend: Backend,
) -> None:
    capture(backend, 1, 4, 8)
    batch = announced(backend, [110, 120, 130])
    variants = backend.graph_variants()
    assert variants is not None
    assert variants.select(batch) == SHARED
    padded = batch_of([110, 120, 130, 1], batch.kv_loc_plan.req_pool_indices)
    backend.init_forward_metadata_out_graph(padded)
    segments = (Segment((0, 1, 2), 0, PREFIX),)
    assert backend.forward_metadata == [("shared", segments, (110, 120, 130, 1), True)]


def test_a_step_without_a_shared_prefix_replays_the_plain_graph(
    backend: Backend,
) -> None:
    capture(backend, 4)
    rows = torch.arange(2)
    reqs = [*make_reqs(0), *make_reqs(1)]  # of two groups
    backend.announce(reqs, rows, [110, 120])
    batch = batch_of([110, 120], rows)
    variants = backend.graph_variants()
    assert variants is not None
    assert variants.select(batch) == PLAIN
    backend.init_forward_metadata_out_graph(batch)
    assert backend.forward_metadata == ("plain", 2)
    assert backend.attention_counters.decisions == {"plain: nothing_shared": 1}


def test_selection_and_planning_can_be_asked_again(backend: Backend) -> None:
    """SGLang asks for the variant once more where it does not pad batches."""
    capture(backend, 4)
    batch = announced(backend, [110, 120, 130, 140])
    variants = backend.graph_variants()
    assert variants is not None
    assert {variants.select(batch) for _ in range(3)} == {SHARED}
    assert backend.attention_counters.decisions == {"cascade: asked_for": 1}


@pytest.mark.parametrize("graph", [True, False])
def test_a_pass_that_was_not_announced_is_plain(backend: Backend, graph: bool) -> None:
    announced(backend, [110, 120])
    stranger = batch_of([110, 120], torch.arange(2))
    nobody = batch_of([110, 120], None)
    nobody.kv_loc_plan = None
    for batch in (stranger, nobody):
        if graph:
            backend.init_forward_metadata_out_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        assert backend.forward_metadata == ("plain", 2)


def test_a_prefill_of_announced_rows_is_plain(backend: Backend) -> None:
    rows = torch.arange(2)
    backend.announce(make_reqs(0, 1), rows, None)
    backend.init_forward_metadata(batch_of([110, 120], rows, ForwardMode.EXTEND))
    assert backend.forward_metadata == ("plain", 2)
    assert backend.attention_counters.num_decode_steps == 0


def test_each_size_is_captured_twice_and_wrappers_of_plain_graphs_stay(
    backend: Backend,
) -> None:
    capture(backend, 1, 4, 8)
    assert backend.decode_cuda_graph_metadata == {
        8: "wrapper 0",
        4: "wrapper 1",
        1: "wrapper 2",
    }
    # a size that can not share keeps SGLang's wrappers in the graph nobody replays
    assert backend.forward_metadata == "wrapper 2"


def test_steps_beyond_the_captured_sizes_are_plain(backend: Backend) -> None:
    capture(backend, 1, 4)
    announced(backend, [110] * 5)
    assert backend.attention_counters.fallbacks == {"too many rows": 1}
    assert backend.attention_counters.decisions == {"plain: unsupported": 1}


def test_a_step_without_room_for_its_lists_is_plain(backend: Backend) -> None:
    announced(backend, [600, 600])
    assert backend.attention_counters.fallbacks == {"too many tokens": 1}


def test_graphs_without_our_variants_leave_steps_plain(backend: Backend) -> None:
    """Another feature of SGLang may have variants of its own."""
    batch = batch_of([1] * 4, torch.zeros(4))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert backend.forward_metadata == ("plain", 4)
    assert backend.graph_variants() is None
    announced(backend, [110, 120])
    assert backend.attention_counters.fallbacks == {"other graph variants": 1}


def test_an_unsupported_model_is_plain_and_the_reason_counted() -> None:
    backend = Backend()
    read: Any = KnownSlots()
    backend.share_prefixes(SharedSteps(StepGate(False), None, read, "MLA"), None)
    batch = announced(backend, [110, 120])
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata == ("plain", 2)
    assert backend.graph_variants() is None
    state = describe_attention(backend)
    assert (state["backend"], state["fallbacks"]) == ("noting", {"MLA": 1})
    assert state["decisions"] == {"plain: unsupported": 1}


def test_unmeasured_steps_are_plain_and_have_one_graph() -> None:
    backend = Backend()
    read: Any = KnownSlots()
    backend.share_prefixes(SharedSteps(StepGate(False), None, read), None)
    announced(backend, [110, 120])
    assert not backend.may_share
    assert backend.graph_variants() is None
    assert backend.attention_counters.decisions == {"plain: unmeasured": 1}
    assert backend.attention_counters.fallbacks == {}


def test_a_backend_of_sglang_that_derives_from_ours_shares_nothing() -> None:
    backend = Backend()
    assert shared_prefix_backend(SimpleNamespace(attn_backend=backend)) is None
    backend.init_forward_metadata(batch_of([110, 120], torch.arange(2)))
    assert backend.forward_metadata == ("plain", 2)
    capture(backend, 2)
    assert backend.decode_cuda_graph_metadata == {2: "wrapper 1"}


def test_the_runner_gets_our_variants_unless_the_model_has_its_own(
    backend: Backend,
) -> None:
    runner = SimpleNamespace(attn_backend=backend)
    decode, verify = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
    ours = graph_variants_hook(lambda *_: None, runner, decode, 1)
    assert ours.capture_labels == (PLAIN, SHARED)
    assert graph_variants_hook(lambda *_: "its own", runner, decode, 1) == "its own"
    assert graph_variants_hook(lambda *_: None, runner, verify, 1) is None
    stock = SimpleNamespace(attn_backend=NotingBackend())
    assert graph_variants_hook(lambda *_: None, stock, decode, 1) is None


def test_counters_tell_what_was_not_read_again(backend: Backend) -> None:
    announced(backend, [110, 120, 130])
    counters = backend.attention_counters
    assert (counters.num_shared_steps, counters.num_shared_rows) == (1, 3)
    assert counters.num_saved_tokens == 2 * PREFIX
