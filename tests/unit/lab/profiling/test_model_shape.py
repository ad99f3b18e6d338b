"""What is read from a config.json, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.lab.profiling.model_shape import shape_of
from dynaplan.util.errors import ConfigError

LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def test_the_parameters_are_those_that_the_model_card_states() -> None:
    shape = shape_of(LLAMA_8B, "config.json")
    assert shape.held_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert shape.held_bytes - shape.read_bytes == 2 * 128256 * 4096, "the embedding is looked up, not read"
    assert shape.context_tokens == 131072
    tied = shape_of({**LLAMA_8B, "tie_word_embeddings": True}, "config.json")
    assert tied.held_bytes == tied.read_bytes == shape.read_bytes


def test_kv_entries_are_split_over_gpus_as_far_as_there_are_heads() -> None:
    shape = shape_of(LLAMA_8B, "config.json")
    assert [shape.kv_token_bytes(size, 2.0) for size in (1, 8, 16)] == [131072, 16384, 16384]


def test_what_is_not_said_follows_from_the_rest() -> None:
    shape = shape_of({k: v for k, v in LLAMA_8B.items() if k != "num_key_value_heads"}, "config.json")
    assert (shape.kv_heads, shape.head_dim, shape.weight_bits) == (32, 128, 16)


def test_the_text_part_of_a_model_with_images_counts() -> None:
    assert shape_of({"text_config": LLAMA_8B}, "config.json") == shape_of(LLAMA_8B, "config.json")


def group(bits: int, kind: str, inputs: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits, "type": kind}, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({}, (16, 16)),
        ({"quant_method": "fp8"}, (8, 8)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (8, 8)),
        ({"quant_method": "awq", "bits": 4}, (4, 16)),
        ({"quant_method": "quark", "w_bit": 4}, (4, 16)),
        (group(8, "float", {"num_bits": 8, "type": "float"}), (8, 8)),
        (group(8, "int", {"num_bits": 8, "type": "int"}), (8, 16)),
        (group(4, "int", None), (4, 16)),
    ],
)
def test_only_fp8_weights_with_fp8_activations_are_multiplied_as_fp8(
    quantization: dict[str, Any], bits: tuple[int, int]
) -> None:
    shape = shape_of({**LLAMA_8B, "quantization_config": quantization}, "config.json")
    assert (shape.weight_bits, shape.compute_bits) == bits


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "new"}, {"quant_method": "compressed-tensors"}, group(0, "int", None)],
)
def test_a_quantization_whose_bits_are_not_said_is_refused(quantization: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"m/config\.json has quantization_config"):
        shape_of({**LLAMA_8B, "quantization_config": quantization}, "m/config.json")


def test_missing_keys_are_named() -> None:
    config = {**LLAMA_8B, "hidden_size": "wide", "vocab_size": True}
    with pytest.raises(ConfigError, match=r"m/config\.json lacks hidden_size, vocab_size"):
        shape_of(config, "m/config.json")


@pytest.mark.parametrize(
    "more",
    [
        {"num_local_experts": 8},
        {"kv_lora_rank": 512},
        {"layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_a_model_that_the_fit_says_nothing_about_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"has {next(iter(more))}: "):
        shape_of({**LLAMA_8B, **more}, "config.json")


def test_layers_of_one_kind_and_a_single_expert_are_nothing_special() -> None:
    more = {"layer_types": ["full_attention"] * 32, "num_experts": 1}
    assert shape_of({**LLAMA_8B, **more}, "config.json") == shape_of(LLAMA_8B, "config.json")
