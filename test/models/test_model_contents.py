"""What the conversion writes: exact weights, tokenizer, template, sense."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sglang_taper import models

if TYPE_CHECKING:
    from .conftest import Built


@pytest.fixture(scope="module")
def gguf_reader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from gguf import GGUFReader

    return GGUFReader(models._fetch_gguf(tmp_path_factory.mktemp("gguf")))


@pytest.fixture(scope="module")
def tokenizer(built: Built) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built.directory)


@pytest.fixture(scope="module")
def tensors(built: Built) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(built.directory / "model.safetensors")


def _rotary_order(rows: Any, num_heads: int) -> Any:
    """llama.cpp interleaves the two halves of each head's rotary pairs; undo it."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gguf_name", "name", "num_rotary_heads"),
    [
        ("token_embd.weight", "model.embed_tokens.weight", 0),
        ("output_norm.weight", "model.norm.weight", 0),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", 9),
        ("blk.29.attn_k.weight", "model.layers.29.self_attn.k_proj.weight", 3),
        ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight", 0),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight", 0),
    ],
)
def test_every_kind_of_tensor_is_what_gguf_dequantises_rounded_to_bf16(
    gguf_name: str,
    name: str,
    num_rotary_heads: int,
    gguf_reader: Any,
    tensors: dict[str, Any],
) -> None:
    import torch
    from gguf.quants import dequantize

    source = next(t for t in gguf_reader.tensors if t.name == gguf_name)
    values = dequantize(source.data, source.tensor_type)
    if num_rotary_heads:
        values = _rotary_order(values, num_rotary_heads)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert torch.equal(tensors[name], expected)


@pytest.mark.slow
def test_all_tensors_are_there_once_and_the_embedding_is_tied(
    gguf_reader: Any, tensors: dict[str, Any], built: Built
) -> None:
    assert len(tensors) == len(gguf_reader.tensors) == 272
    assert "lm_head.weight" not in tensors
    config = json.loads((built.directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "Price: 12345.60  (was  99)\n\n\tok?",
        "  two leading spaces, it's we'll",
        "Grüße, 世界! \U0001f980 naïve",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_text_survives_the_tokenizer_unchanged(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_numbers_are_split_into_digits_apart_from_spaces(tokenizer: Any) -> None:
    assert tokenizer.tokenize("a  42") == ["a", "ĠĠ", "4", "2"]


@pytest.mark.slow
def test_special_tokens_are_single_and_the_turn_end_is_eos(
    tokenizer: Any, built: Built
) -> None:
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|im_end|>") == [2] == [tokenizer.eos_token_id]
    generation = json.loads((built.directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


@pytest.mark.slow
def test_the_chat_template_is_chatml_with_smollms_system_prompt(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by"
        " Hugging Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_a_greedy_answer_is_sensible_and_ends_by_itself(
    tokenizer: Any, built: Built
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(built.directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]
    answer = tokenizer.decode(output[inputs.input_ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
