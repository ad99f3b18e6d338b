"""What one worker of each engine takes, by its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynaplan.engines.common.memory_needs import memory_need
from tests.unit.engines.common.test_gguf_header import GOOD, written
from tests.unit.engines.common.test_model_shapes import LLAMA

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
    assert memory_need("vllm", {}, 1) is None
