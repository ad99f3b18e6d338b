"""What the files of a Hugging Face directory, and GGUF files in parts, say of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynaplan.engines.common.model_shapes import gguf_weights_bytes, hf_shape, hf_weights_bytes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}


def model(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_llama_is_known_exactly(tmp_path: Path) -> None:
    shape = hf_shape(model(tmp_path, **LLAMA))
    assert shape
    assert (shape.bytes_per_token(), shape.trained_tokens, shape.is_exact) == (131072, 131072, True)


def test_more_gpus_than_kv_heads_keep_them_more_than_once(tmp_path: Path) -> None:
    shape = hf_shape(model(tmp_path, **LLAMA), tensor_parallel=16)
    assert shape
    assert shape.bytes_per_token() == 2 * 131072


def test_the_text_part_of_a_model_for_pictures_counts(tmp_path: Path) -> None:
    shape = hf_shape(model(tmp_path, model_type="llava", text_config=LLAMA))
    assert shape
    assert shape.bytes_per_token() == 131072


@pytest.mark.parametrize(
    ("more", "is_exact"),
    [
        ({"sliding_window": 4096}, False),
        ({"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"sliding_window": None}, True),
        ({"model_type": "mamba2"}, False),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, False),
    ],
)
def test_a_model_that_may_keep_less_is_no_certain_one(
    tmp_path: Path, more: dict[str, Any], is_exact: bool
) -> None:
    shape = hf_shape(model(tmp_path, **{**LLAMA, **more}))
    assert shape
    assert shape.is_exact is is_exact


def test_the_latent_vector_of_mla_is_kept_on_each_gpu(tmp_path: Path) -> None:
    shape = hf_shape(model(tmp_path, **LLAMA, kv_lora_rank=512, qk_rope_head_dim=64), tensor_parallel=2)
    assert shape
    assert shape.bytes_per_token() == 32 * 576 * 2 * 2


def test_weights_are_what_the_index_says_or_what_the_files_are(tmp_path: Path) -> None:
    assert hf_weights_bytes(tmp_path) == 0
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(7))
    assert hf_weights_bytes(tmp_path) == 7
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(100))
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(bytes(50))
    assert hf_weights_bytes(tmp_path) == 50
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 60}}')
    assert hf_weights_bytes(tmp_path) == 60


def test_a_gguf_file_in_parts_is_as_large_as_all_of_them(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(bytes(10))
    (tmp_path / "m.gguf").write_bytes(bytes(3))
    assert gguf_weights_bytes(tmp_path / "m-00001-of-00002.gguf") == 20
    assert gguf_weights_bytes(tmp_path / "m.gguf") == 3
    assert gguf_weights_bytes(tmp_path / "none.gguf") == 0


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*LLAMA, "metadata"]), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from([*LLAMA, "text_config", "kv_lora_rank", "head_dim"]), VALUES) | VALUES)
def test_whatever_a_config_holds_raises_nothing(tmp_path: Path, config: Any) -> None:
    merged = {**LLAMA, **config} if isinstance(config, dict) else config
    (tmp_path / "config.json").write_text(json.dumps(merged))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(config))
    shape = hf_shape(tmp_path)
    assert shape is None or shape.bytes_per_token() >= 0
    assert hf_weights_bytes(tmp_path) >= 0


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_config_that_is_none_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert hf_shape(tmp_path) is None
