"""Our FlashInfer backend without a GPU: SGLang's own layer code on a planned step.

FlashInfer's modules are imitated and our kernels interpreted; what SGLang does around
them (`forward_decode`, the order of capture and replay) is its own code or is followed
call by call.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend as stock
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils import capture_mode
from trees import relative_error

from sglang_taper.config import TaperConfig
from sglang_taper.engine.attention import flashinfer_backend
from sglang_taper.engine.attention.flashinfer_backend import (
    SharedPrefixFlashInferBackend,
)
from sglang_taper.engine.attention.slot_copies import PASSES_UNTIL_READ
from sglang_taper.errors import UnsupportedMode
from sglang_taper.ops.reference import reference_decode

HEADS, KV_HEADS, DIM = 8, 2, 64
CONTEXT, ROWS = 200, 12
SCALE = 1 / math.sqrt(DIM)
SIZES = (1, 2, 4, 8)


class Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Group:
    num_live = 4


class Pool:
    def __init__(self, num_slots: int) -> None:
        self.kv = torch.randn(2, num_slots, KV_HEADS, DIM, dtype=torch.float16)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv[0], self.kv[1]


LAYER = SimpleNamespace(
    layer_id=0,
    tp_q_head_num=HEADS,
    tp_k_head_num=KV_HEADS,
    head_dim=DIM,
    qk_head_dim=DIM,
    v_head_dim=DIM,
    logit_cap=0.0,
    scaling=SCALE,
    sliding_window_size=-1,
    is_cross_attention=False,
    pos_encoding_mode="NONE",
    use_irope=False,
    k_scale_float=None,
    v_scale_float=None,
)


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(stock, "FlashInferAttnBackend", SharedPrefixFlashInferBackend)
    monkeypatch.setattr(SharedPrefixFlashInferBackend, "__init__", lambda self: None)
    monkeypatch.setattr(flashinfer_backend, "attention_layers", lambda _: [LAYER])
    parallel = SimpleNamespace(attn_dcp_size=1)
    monkeypatch.setattr(flashinfer_backend, "get_parallel", lambda: parallel)
    monkeypatch.setattr(
        flashinfer_backend,
        "SlotCopies",
        lambda table: _copies(table, Event),
    )


_copies = flashinfer_backend.SlotCopies


def make_backend(wanted: str, **changes: Any) -> Any:
    """As SGLang's constructor leaves it, as far as a decode step looks at it."""
    torch.manual_seed(0)
    table = torch.randperm(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT)
    for row in (2, 5, 3):
        table[row, :90] = table[1, :90]
    table[5, 90:130] = table[2, 90:130]
    backend: Any = SharedPrefixFlashInferBackend()  # type: ignore[call-arg]
    values = {
        "use_sliding_window_kv_pool": False,
        "num_wrappers": 1,
        "enable_mis": False,
        "is_dllm_model": False,
        "decode_uses_dequant_workspace": False,
        "is_nvfp4_kvcache": False,
        "enable_deterministic": False,
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "token_to_kv_pool": Pool(ROWS * CONTEXT),
        "workspace_buffer": torch.zeros(1024, dtype=torch.uint8),
        "max_context_len": CONTEXT,
        "cuda_graph_kv_indices": [torch.zeros(8 * CONTEXT, dtype=torch.int32)],
        "decode_cuda_graph_metadata": {},
    }
    for name, value in (values | changes).items():
        setattr(backend, name, value)
    runner = SimpleNamespace(
        is_draft_worker=False,
        spec_algorithm=SimpleNamespace(is_speculative=lambda: False),
        use_mla_backend=False,
        dtype=torch.float16,
        kv_cache_dtype=torch.float16,
        max_total_num_tokens=ROWS * CONTEXT,
    )
    config = TaperConfig(branch_policy="taper", shared_prefix_attention=wanted)
    backend._share(runner, config)
    return backend


class Server:
    """What the scheduler and SGLang's decode runner do with a backend, in order."""

    def __init__(self, backend: Any, graphs: bool, patch: pytest.MonkeyPatch) -> None:
        self.backend, self.graphs = backend, graphs
        self.plain: list[int] = []
        group = Group()
        self.reqs = [
            SimpleNamespace(
                taper=SimpleNamespace(group=group, ended=False),
                kv=SimpleNamespace(req_pool_idx=row),
                retraction_count=0,
            )
            for row in range(ROWS)
        ]
        for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
            patch.setattr(stock_class(), name, self.note_plain)
        if graphs:
            state = "init_cuda_graph_state"
            patch.setattr(stock_class(), state, lambda *_: None)
            backend.init_cuda_graph_state(8, 8)
            self.captured = {size: self.capture(size) for size in reversed(SIZES)}

    def note_plain(self, batch: Any, in_capture: bool = False) -> None:
        self.plain.append(batch.batch_size)
        self.backend.decode_cuda_graph_metadata.setdefault(batch.batch_size, [])

    def capture(self, size: int) -> Any:
        """The metadata of the sharing graph of a size, whose launches are replayed."""
        for label in self.backend.graph_variants().capture_labels:
            capture_mode._set_capture_attention_variant(label)
            batch = self.batch([0] * size, [1] * size, None)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        capture_mode._set_capture_attention_variant(None)
        return self.backend.forward_metadata

    def batch(self, rows: list[int], lens: list[int], announced: Any) -> Any:
        return SimpleNamespace(
            batch_size=len(rows),
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(lens),
            seq_lens_cpu=torch.tensor(lens),
            kv_loc_plan=SimpleNamespace(req_pool_indices=announced),
        )

    def step(self, rows: list[int], lens: list[int]) -> torch.Tensor | None:
        """The output of one layer; None if SGLang's own attention would compute it."""
        backend, announced = self.backend, torch.tensor(rows)
        backend.announce([self.reqs[row] for row in rows], announced, lens)
        live = self.batch(rows, lens, announced)
        self.plain.clear()
        if not self.graphs:
            backend.init_forward_metadata(live)
            return None if self.plain else self.layer(rows, lens, live)
        variant = backend.graph_variants().select(live)
        size = next(size for size in SIZES if size >= len(rows))
        missing = size - len(rows)
        view = self.batch([*rows, *[0] * missing], [*lens, *[1] * missing], announced)
        backend.init_forward_metadata_out_graph(view)
        assert bool(self.plain) == (variant == "plain")
        backend.forward_metadata = self.captured[size]
        return None if self.plain else self.layer(rows, lens, view)

    def layer(self, rows: list[int], lens: list[int], batch: Any) -> torch.Tensor:
        """SGLang's own `forward_decode`, compared with float64."""
        shape = (batch.batch_size, HEADS * DIM)
        q = torch.randn(shape, dtype=torch.float16)
        out = self.backend.forward_decode(q, None, None, LAYER, batch)
        assert out.shape == shape
        table = self.backend.req_to_token_pool.req_to_token
        slots = [table[row, :n] for row, n in zip(rows, lens, strict=True)]
        queries = q[: len(rows)].view(-1, HEADS, DIM)
        pools = self.backend.token_to_kv_pool.get_kv_buffer(0)
        truth, _ = reference_decode(queries, *pools, slots, SCALE)
        assert relative_error(out[: len(rows)].view(-1, HEADS, DIM), truth) < 2e-3
        return out


def stock_class() -> Any:
    return SharedPrefixFlashInferBackend.__mro__[2]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("wanted", ["flashinfer", "triton"])
def test_steps_with_changing_groups_are_right(
    wanted: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(make_backend(wanted), graphs, monkeypatch)
    rows, lens = [2, 7, 5, 1, 3], [140, 30, 150, 100, 95]
    outs = [server.step(rows, lens) for _ in range(PASSES_UNTIL_READ + 2)]
    assert [out is None for out in outs] == [True] * PASSES_UNTIL_READ + [False] * 2
    counters = server.backend.attention_counters
    assert counters.num_shared_steps == 2
    saved = counters.num_saved_tokens
    # two levels: 1, 2, 3 and 5 share 90; a tree: 2 and 5 share 40 more
    assert saved == 2 * (3 * 90 + 40 * (wanted == "triton"))
    # others leave and come back: other groups, other batch sizes, other order
    assert server.step([5, 2], [151, 141]) is not None
    assert server.step([7], [31]) is None
    assert server.step([3, 1, 2], [96, 101, 142]) is not None
    assert server.step([7, 3], [32, 97]) is None
    np.random.default_rng(0).shuffle(rows)
    assert server.step(rows, [n + 5 for n in [150] * 5]) is not None


@pytest.mark.parametrize("wanted", ["flashinfer", "triton"])
def test_a_model_that_can_not_share_refuses_to_be_asked(wanted: str) -> None:
    with pytest.raises(UnsupportedMode, match="auto or off with this model: determ"):
        make_backend(wanted, enable_deterministic=True)


def test_auto_without_measured_constants_makes_nothing() -> None:
    backend = make_backend("auto")
    assert backend.graph_variants() is None
    assert not backend.may_share
    assert backend.shared_prefix_attention == "flashinfer"
