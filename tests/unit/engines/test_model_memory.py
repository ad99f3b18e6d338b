"""The memory of a model: the formula, the shapes that files tell, and what one worker takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynaplan.engines.model_memory import (
    TYPE_BYTES,
    KvShape,
    MemoryNeed,
    gguf_weights_bytes,
    hf_shape,
    hf_weights_bytes,
    longest_context,
    memory_need,
)
from tests.unit.engines.test_gguf import GOOD, written

LLAMA_3_8B = KvShape((8,) * 32, 128, 128)


def test_a_token_of_llama_3_8b_takes_128_kib_and_half_of_it_in_8_bits() -> None:
    """The figure of Dynamo's mocker (engines/timing_model/step_timing.py), and of Llama 3.1's model card."""
    assert LLAMA_3_8B.bytes_per_token() == 128 * 1024
    assert LLAMA_3_8B.bytes_per_token(1, 1) == 64 * 1024
    assert KvShape((32,) * 32, 128, 128).bytes_per_token() == 512 * 1024, "Llama 2 7B: no GQA"


def test_layers_may_have_different_numbers_of_heads() -> None:
    assert KvShape((8, 0, 4), 64, 32).bytes_per_token(2, 1) == 12 * (64 * 2 + 32)


def test_mla_keeps_one_latent_vector_per_layer() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 values in 16 bit are 70,272 bytes (DeepSeek's report: 70 kB)."""
    assert KvShape((128,) * 61, 192, 128, latent_dim=576).bytes_per_token() == 70_272


def test_quantised_types_have_the_bytes_of_their_blocks() -> None:
    assert TYPE_BYTES["q8_0"] == 1.0625
    assert TYPE_BYTES["q4_0"] == 0.5625


def test_a_worker_needs_its_weights_and_the_entries_of_all_its_requests() -> None:
    need = MemoryNeed(1000, 10, 300, sequences=4)
    assert (need.kv_bytes, need.total_bytes) == (12_000, 13_000)


@pytest.mark.parametrize(
    ("kv_bytes", "token_bytes", "fits"),
    [(20_480, 40, 512), (20_479, 40, 256), (10_000, 40, 0), (-5, 40, 0), (10**9, 0, 0)],
)
def test_the_longest_context_that_fits(kv_bytes: float, token_bytes: float, fits: int) -> None:
    assert longest_context(kv_bytes, token_bytes) == fits


@given(st.floats(0, 1e13), st.floats(1, 1e6))
def test_what_is_said_to_fit_fits(kv_bytes: float, token_bytes: float) -> None:
    assert longest_context(kv_bytes, token_bytes) * token_bytes <= kv_bytes * (1 + 1e-9)


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


TOKEN_BYTES = 2 * 2 * (16 + 16) * 2.0
"""The entries of the GGUF header GOOD: 2 layers of 2 KV heads of 16 values, key and value, in 16 bit."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    return tmp_path


def test_llamacpp_takes_the_context_of_each_slot(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    need = memory_need("llamacpp", {"model": str(path), "max-model-len": 1000, "max-num-seqs": 3}, 1)
    assert need
    assert (need.context_tokens, need.sequences, need.token_bytes) == (1000, 3, TOKEN_BYTES)
    assert (need.weights_bytes, need.is_certain, need.gpu_fraction) == (len(GOOD), True, 1.0)


@pytest.mark.parametrize(
    ("options", "tokens", "option"),
    [
        ({"ctx-size": 2048}, 2048, "ctx-size"),
        ({"ctx-size": 2048, "parallel": 2}, 2048, "ctx-size"),
        ({"command": "llama-server -m {path} -c 4096 -np 4"}, 4096, "ctx-size"),
        ({"command": "llama-server -m {path} -c 4096 -c 512"}, 512, "ctx-size"),
        ({"command": "LLAMA_ARG_CTX_SIZE=256 llama-server -m {path}"}, 256, "ctx-size"),
    ],
)
def test_a_context_of_all_requests_is_named_as_it_is_written(
    tmp_path: Path, options: dict[str, Any], tokens: int, option: str
) -> None:
    path = written(tmp_path, GOOD)
    given = {key: each.format(path=path) if key == "command" else each for key, each in options.items()}
    own = given if "command" in given else {**given, "model": str(path)}
    need = memory_need("llamacpp", own, 1)
    assert need
    assert (need.context_tokens, need.sequences, need.context_option) == (tokens, 1, option)


def test_llamacpps_types_of_entries_count(tmp_path: Path) -> None:
    options = {"model": str(written(tmp_path, GOOD)), "cache-type-k": "q8_0", "cache-type-v": "f32"}
    need = memory_need("llamacpp", options, 0.5)
    assert need
    assert (need.token_bytes, need.gpu_fraction) == (2 * 2 * 16 * (34 / 32 + 4), 0.5)
    assert memory_need("llamacpp", {**options, "cache-type-k": "iq9"}, 1) is None


def test_vllm_must_have_room_for_one_request(directory: Path) -> None:
    need = memory_need("vllm", {"model": str(directory), "max-model-len": 1000}, 1)
    assert need
    assert (need.kv_bytes, need.weights_bytes, need.is_certain) == (1000 * 131072, 5000, True)
    assert need.gpu_fraction == 0.9


@pytest.mark.parametrize(
    ("engine", "more", "is_certain"),
    [
        ("vllm", {"max-model-len": 1000}, True),
        ("vllm", {}, False),
        ("vllm", {"max-model-len": 1000, "quantization": "fp8"}, False),
        ("vllm", {"max-model-len": 1000, "cpu-offload-gb": 10}, False),
        ("sglang", {"max-model-len": 1000}, False),
        ("trtllm", {"max-model-len": 1000}, False),
    ],
)
def test_certain_is_only_what_vllm_itself_would_refuse(
    directory: Path, engine: str, more: dict[str, Any], is_certain: bool
) -> None:
    need = memory_need(engine, {"model": str(directory), **more}, 1)
    assert need
    assert need.is_certain is is_certain


def test_options_of_the_directory_engines_count(directory: Path) -> None:
    options = {"model": str(directory), "kv-cache-dtype": "fp8", "data-parallel-size": 2}
    need = memory_need("vllm", {**options, "gpu-memory-utilization": 0.5}, 2)
    assert need
    assert (need.token_bytes, need.weights_bytes, need.gpu_fraction) == (131072, 10_000, 0.5)
    assert need.context_tokens == LLAMA["max_position_embeddings"]


def test_a_model_that_is_a_name_tells_nothing(tmp_path: Path) -> None:
    for engine in ("sim", "vllm", "llamacpp"):
        assert memory_need(engine, {"model": "meta-llama/Llama-3.1-8B-Instruct"}, 1) is None
    assert memory_need("vllm", {"model": str(tmp_path)}, 1) is None
    assert memory_need("vllm", {"model": "~nobody-here/m"}, 1) is None
    assert memory_need("vllm", {}, 1) is None
