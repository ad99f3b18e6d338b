"""The shape of a model's KV entries and the size of its weights, read from the model's files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynaplan.engines.common.gguf_header import read_metadata
from dynaplan.engines.timing_model.kv_memory import KvShape

EXACT = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2moe", "qwen2_moe"}) | frozenset(
    {"qwen3", "qwen3moe", "qwen3_moe", "olmo2", "granite", "starcoder2"}
)
"""Architectures that are known to keep the KV entries of every token in every layer, and nothing else."""

MOST_LAYERS = 1024
LARGEST = 2**24
"""The largest number of heads, dimensions or layers that is taken for one."""

_GGUF_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def gguf_shape(path: Path) -> KvShape | None:
    """Return the shape of a GGUF file's model; None when its header does not tell it."""
    metadata = read_metadata(path)
    name = metadata.get("general.architecture")

    def key(rest: str) -> Any:
        return metadata.get(f"{name}.{rest}")

    layers, heads = _whole(key("block_count")), key("attention.head_count")
    width, heads_kv = _whole(key("embedding_length")), key("attention.head_count_kv")
    per_layer = _per_layer(heads if heads_kv is None else heads_kv, layers)
    head = max(_per_layer(heads, layers), default=0)
    usual_dim = width // head if head else 0
    key_dim = _whole(key("attention.key_length")) or usual_dim
    value_dim = _whole(key("attention.value_length")) or usual_dim
    if not per_layer or not key_dim or not value_dim:
        return None
    others = ("attention.sliding_window", "attention.kv_lora_rank", "ssm.state_size")
    is_exact = str(name) in EXACT and not any(key(each) for each in others)
    return KvShape(per_layer, key_dim, value_dim, 0, _whole(key("context_length")), is_exact)


def gguf_weights_bytes(path: Path) -> int:
    """Return the size of a GGUF file in bytes, with all its parts; 0 when it cannot be read."""
    part = _GGUF_PART.search(path.name)
    pattern = f"{path.name[: part.start()]}-*-of-{part[1]}.gguf" if part else ""
    try:
        files = [each for each in path.parent.iterdir() if each.match(pattern)] if part else [path]
        return sum(each.stat().st_size for each in files)
    except OSError:
        return 0


def hf_shape(directory: Path, tensor_parallel: int = 1) -> KvShape | None:
    """Return the shape of a Hugging Face directory's model over all GPUs of a worker; None when not told.

    KV heads that do not divide by ``tensor_parallel`` GPUs are kept more than once; MLA's latent vector is
    kept on each.
    """
    config = _object(directory / "config.json")
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    layers, heads = _whole(config.get("num_hidden_layers")), _whole(config.get("num_attention_heads"))
    if not 0 < layers <= MOST_LAYERS or not heads:
        return None
    kv_heads = _whole(config.get("num_key_value_heads")) or heads
    dim = _whole(config.get("head_dim")) or _whole(config.get("hidden_size")) // heads
    latent = _whole(config.get("kv_lora_rank"))
    latent += _whole(config.get("qk_rope_head_dim")) if latent else 0
    if not dim and not latent:
        return None
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    is_exact = str(config.get("model_type")) in EXACT and not has_window and not latent
    kept = max(kv_heads, tensor_parallel)
    trained = _whole(config.get("max_position_embeddings"))
    return KvShape((kept,) * layers, dim, dim, latent * tensor_parallel, trained, is_exact)


def hf_weights_bytes(directory: Path) -> int:
    """Return the size of the weights in bytes: as the index tells it, else of the files; 0 without any."""
    total = _object(directory / "model.safetensors.index.json").get("metadata")
    if isinstance(total, Mapping) and _whole(total.get("total_size"), 2**63):
        return _whole(total.get("total_size"), 2**63)
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin"):
        try:
            if sizes := [each.stat().st_size for each in directory.glob(pattern)]:
                return sum(sizes)
        except OSError:
            continue
    return 0


def _object(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _whole(value: Any, most: int = LARGEST) -> int:
    """Return a whole number from 1 on; 0 for anything else."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_number and 0 < value <= most else 0


def _per_layer(value: Any, layers: int) -> tuple[int, ...]:
    """Return one number for each layer, of one for all or of one for each; empty when it is neither."""
    if not 0 < layers <= MOST_LAYERS:
        return ()
    if isinstance(value, tuple):
        return tuple(map(_whole, value)) if len(value) == layers else ()
    return (_whole(value),) * layers if _whole(value) else ()
