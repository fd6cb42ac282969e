"""Our `torch_native` computes what SGLang's does, and reads a shared prefix once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_taper.config import env_of
from sglang_taper.engine.attention.torch_backend import SharedPrefixTorchBackend
from sglang_taper.engine.attention.use import describe_attention, shared_prefix_backend

# SGLang's own class, also in a process in which ours has taken its name
Stock: Any = SharedPrefixTorchBackend.__mro__[1]
HEADS, KV_HEADS, DIM = 6, 2, 16
PREFIX, LENS = 700, (720, 703, 701, 40)


class Pool:
    """One layer of KV."""

    def __init__(self, num_slots: int) -> None:
        self.kv = torch.randn(2, num_slots, KV_HEADS, DIM)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.kv[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.kv[1]


@pytest.fixture(params=["native", "torch"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows 1, 4, 2 share their first 700 slots; row 3 is alone."""
    monkeypatch.setenv(env_of("shared_prefix_attention"), request.param)
    torch.manual_seed(0)
    table = torch.randperm(8 * 800, dtype=torch.int32).view(8, 800)
    for row in (4, 2):
        table[row, :PREFIX] = table[1, :PREFIX]
    return SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=Pool(8 * 800),
    )


def make_layer(**changes: Any) -> Any:
    values = {
        "layer_id": 0,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": KV_HEADS,
        "qk_head_dim": DIM,
        "v_head_dim": DIM,
        "scaling": 0.3,
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        "sliding_window_size": -1,
    }
    return SimpleNamespace(**values | changes)


def make_batch(mode: ForwardMode, **changes: Any) -> Any:
    lens = torch.tensor(LENS)
    extend = torch.tensor([20, 3, 1, 40])
    values = {
        "forward_mode": mode,
        "req_pool_indices": torch.tensor([1, 4, 2, 3]),
        "seq_lens": lens,
        "out_cache_loc": None,
        "encoder_lens": None,
        "extend_seq_lens": extend,
        "extend_prefix_lens": lens - extend,
        "extend_seq_lens_cpu": extend.tolist(),
        "extend_prefix_lens_cpu": (lens - extend).tolist(),
    }
    return SimpleNamespace(**values | changes)


class Group:
    num_live = 3


def make_reqs(batch: Any) -> list[Any]:
    """The branches of the batch: the last row has no group."""
    group, rows = Group(), batch.req_pool_indices.tolist()
    return [
        SimpleNamespace(
            taper=SimpleNamespace(group=owner, ended=False),
            kv=SimpleNamespace(req_pool_idx=row),
            retraction_count=0,
        )
        for owner, row in zip((group, group, group, None), rows, strict=True)
    ]


def run(backend: Any, batch: Any, layer: Any) -> torch.Tensor:
    """The output of one layer, without writing KV."""
    is_decode = batch.forward_mode.is_decode()
    num_tokens = len(LENS) if is_decode else sum(batch.extend_seq_lens_cpu)
    q = torch.randn(num_tokens, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    forward = backend.forward_decode if is_decode else backend.forward_extend
    return forward(q, None, None, layer, batch, save_kv_cache=False)  # type: ignore[no-any-return]


def assert_equals_stock(runner: Any, backend: Any, batch: Any, layer: Any) -> None:
    stock = Stock(runner)
    stock.init_forward_metadata(batch)
    expected = run(stock, batch, layer)
    torch.testing.assert_close(run(backend, batch, layer), expected)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_outputs_equal_those_of_stock(runner: Any, mode: ForwardMode) -> None:
    backend, batch = SharedPrefixTorchBackend(runner), make_batch(mode)
    backend.step_prefixes.announce(make_reqs(batch))
    backend.init_forward_metadata(batch)
    assert_equals_stock(runner, backend, batch, make_layer())
    assert backend.attention_counters.fallbacks == {}


def test_a_prefix_is_read_once_for_the_rows_of_its_group(
    runner: Any, request: pytest.FixtureRequest
) -> None:
    backend, batch = SharedPrefixTorchBackend(runner), make_batch(ForwardMode.DECODE)
    backend.step_prefixes.announce(make_reqs(batch))
    backend.init_forward_metadata(batch)
    state = describe_attention(backend)
    assert state["backend"] == request.node.callspec.params["runner"]
    assert "why_not_native" not in state
    assert (state["num_shared_steps"], state["num_shared_rows"]) == (1, 3)
    assert state["num_saved_tokens"] == 2 * PREFIX
    assert state["num_kv_tokens"] == sum(LENS)


def test_a_batch_nobody_announced_shares_nothing_and_is_right(runner: Any) -> None:
    backend, batch = SharedPrefixTorchBackend(runner), make_batch(ForwardMode.DECODE)
    backend.step_prefixes.announce(make_reqs(batch)[:3])
    backend.init_forward_metadata(batch)
    assert_equals_stock(runner, backend, batch, make_layer())
    assert backend.attention_counters.num_saved_tokens == 0


@pytest.mark.parametrize(
    ("mode", "changes", "reason"),
    [
        (ForwardMode.DECODE, {"sliding_window_size": 30}, "sliding window"),
        (ForwardMode.EXTEND, {"sliding_window_size": 30}, "sliding window"),
        (ForwardMode.EXTEND, {"attn_type": AttentionType.ENCODER_ONLY}, "not causal"),
    ],
)
def test_layers_we_do_not_serve_go_to_stock_and_are_counted_once_per_pass(
    runner: Any, mode: ForwardMode, changes: dict[str, Any], reason: str
) -> None:
    backend, batch = SharedPrefixTorchBackend(runner), make_batch(mode)
    layer = make_layer(**changes)
    for num_passes in (1, 2):
        backend.init_forward_metadata(batch)
        for _ in range(2):
            assert_equals_stock(runner, backend, batch, layer)
        assert backend.attention_counters.fallbacks == {reason: num_passes}


def test_another_batch_than_the_planned_one_goes_to_stock(runner: Any) -> None:
    backend, batch = SharedPrefixTorchBackend(runner), make_batch(ForwardMode.DECODE)
    backend.init_forward_metadata(make_batch(ForwardMode.DECODE))
    assert_equals_stock(runner, backend, batch, make_layer())
    backend.init_forward_metadata(make_batch(ForwardMode.EXTEND))
    assert_equals_stock(runner, backend, batch, make_layer())
    assert backend.attention_counters.fallbacks == {"not planned": 2}


def test_passes_we_do_not_serve_go_to_stock(runner: Any) -> None:
    backend = SharedPrefixTorchBackend(runner)
    batch = make_batch(ForwardMode.DECODE, encoder_lens=torch.zeros(4, dtype=torch.int))
    backend.init_forward_metadata(batch)
    assert_equals_stock(runner, backend, batch, make_layer())
    backend.init_forward_metadata(make_batch(ForwardMode.TARGET_VERIFY))
    assert backend.attention_counters.fallbacks == {"encoder": 1, "forward mode": 1}


def test_an_idle_pass_needs_no_plan(runner: Any) -> None:
    backend = SharedPrefixTorchBackend(runner)
    backend.init_forward_metadata(make_batch(ForwardMode.IDLE))
    assert backend.forward_metadata is None
    assert backend.attention_counters.fallbacks == {}


def test_the_scheduler_finds_the_backend_that_decodes(runner: Any) -> None:
    backend = SharedPrefixTorchBackend(runner)
    wrapper = SimpleNamespace(prefill_backend=object(), decode_backend=backend)
    for outer in (backend, wrapper, SimpleNamespace(full_attn_backend=backend)):
        assert shared_prefix_backend(SimpleNamespace(attn_backend=outer)) is backend
    stock = SimpleNamespace(attn_backend=Stock(runner))
    assert shared_prefix_backend(stock) is None
    assert describe_attention(None) == {"backend": "stock"}


def test_the_state_says_why_the_kernel_does_not_serve(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_of("shared_prefix_attention"), "auto")
    runner.kv_cache_dtype = torch.float64
    state = describe_attention(SharedPrefixTorchBackend(runner))
    assert state["backend"] == "torch"
    assert state["why_not_native"] == "the type float32, float64"
