"""The memory of a model: what its KV entries and its weights take, and the longest context that fits.

The shape of the KV entries and the size of the weights are read from the model's files (``gguf_shape``,
``hf_shape``); with an engine's options they give what one of its workers takes (``memory_need``).

For each token, each layer keeps one key and one value per KV head::

    bytes per token = sum over layers of kv_heads x (key_dim x bytes_of_key + value_dim x bytes_of_value)

With multi-head attention ``kv_heads`` is the number of heads; with grouped-query attention (GQA) it is
smaller; with equal dimensions and types this is the well-known ``2 x layers x kv_heads x head_dim x bytes``.
Multi-head latent attention (MLA, DeepSeek) keeps one latent vector per layer and token instead, of
``kv_lora_rank + qk_rope_head_dim`` values, for all heads together. Layers with a sliding window keep the
window's tokens only, and recurrent layers keep a state whose size does not depend on the context: for both
the formula gives an upper bound, which ``is_exact`` says.

Sources: Kwon et al. 2023 (PagedAttention), section 3; Ainslie et al. 2023 (GQA); DeepSeek-V2 (2024), section
2.1; the block sizes of quantised types are ggml's (``ggml-common.h``: q8_0 is 34 bytes for 32 values).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaplan.config.command_words import COMMAND, effective_options
from dynaplan.config.parallelism import data_parallel_size, tensor_parallel_size
from dynaplan.engines.gguf import read_metadata
from dynaplan.engines.kind import EngineKind
from dynaplan.engines.model_files import DIRECTORY, GGUF_FILE, gguf_parts, model_kind
from dynaplan.engines.registry import engine_kind

TYPE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes of one value by ggml's name of its type."""


@dataclass(frozen=True)
class KvShape:
    """The KV entries of one token. ``kv_heads`` are the KV heads of each layer; dimensions are per head.

    ``latent_dim`` is the length of MLA's latent vector, 0 without; it replaces heads and dimensions.
    ``trained_tokens`` is the context that the model was trained for, 0 when not known.
    """

    kv_heads: tuple[int, ...]
    key_dim: int
    value_dim: int
    latent_dim: int = 0
    trained_tokens: int = 0
    is_exact: bool = True

    def bytes_per_token(self, key_bytes: float = 2.0, value_bytes: float = 2.0) -> float:
        """Return the memory of one token's KV entries in bytes, given the bytes of one value of each kind."""
        if self.latent_dim:
            return len(self.kv_heads) * self.latent_dim * key_bytes
        return sum(self.kv_heads) * (self.key_dim * key_bytes + self.value_dim * value_bytes)


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that one worker takes at its start, in bytes.

    ``context_tokens`` tokens are kept for each of ``sequences`` requests, at ``token_bytes`` each.
    ``is_certain`` says that the engine takes all of this at once, or refuses to start: with no option that
    would make it smaller, and a model whose KV entries are known exactly. ``gpu_fraction`` is the part of the
    memory of its GPUs that the engine may use. ``context_option`` is the option that says the context.
    """

    weights_bytes: float
    token_bytes: float
    context_tokens: int
    sequences: int = 1
    is_certain: bool = False
    gpu_fraction: float = 1.0
    context_option: str = "max-model-len"

    @property
    def kv_bytes(self) -> float:
        return self.token_bytes * self.context_tokens * self.sequences

    @property
    def total_bytes(self) -> float:
        return self.weights_bytes + self.kv_bytes


def longest_context(kv_bytes: float, token_bytes: float) -> int:
    """Return the longest context in tokens whose KV entries fit into ``kv_bytes``; 0 when none does.

    ``token_bytes`` are the bytes of one more token of context, over all requests and workers. Rounded down to
    a multiple of 256, the step in which llama.cpp takes a context.
    """
    return max(0, int(kv_bytes / token_bytes)) // 256 * 256 if token_bytes > 0 else 0


FULL_ATTENTION_ARCHITECTURES = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2moe", "qwen2_moe"}
) | frozenset({"qwen3", "qwen3moe", "qwen3_moe", "olmo2", "granite", "starcoder2"})
"""Architectures that are known to keep the KV entries of every token in every layer, and nothing else."""

MAX_LAYERS = 1024
MAX_DIMENSION = 2**24
"""The largest number of heads, dimensions or layers that is taken for one."""


def gguf_shape(path: Path) -> KvShape | None:
    """Return the shape of a GGUF file's model; None when its header does not tell it."""
    metadata = read_metadata(path)
    name = metadata.get("general.architecture")

    def key(rest: str) -> Any:
        return metadata.get(f"{name}.{rest}")

    layers, heads = _positive(key("block_count")), key("attention.head_count")
    width, heads_kv = _positive(key("embedding_length")), key("attention.head_count_kv")
    per_layer = _per_layer(heads if heads_kv is None else heads_kv, layers)
    head = max(_per_layer(heads, layers), default=0)
    usual_dim = width // head if head else 0
    key_dim = _positive(key("attention.key_length")) or usual_dim
    value_dim = _positive(key("attention.value_length")) or usual_dim
    if not per_layer or not key_dim or not value_dim:
        return None
    others = ("attention.sliding_window", "attention.kv_lora_rank", "ssm.state_size")
    is_exact = str(name) in FULL_ATTENTION_ARCHITECTURES and not any(key(each) for each in others)
    return KvShape(per_layer, key_dim, value_dim, 0, _positive(key("context_length")), is_exact)


def gguf_weights_bytes(path: Path) -> int:
    """Return the size of a GGUF file in bytes, with all its parts; 0 when it cannot be read."""
    try:
        return sum(each.stat().st_size for each in gguf_parts(path))
    except OSError:
        return 0


def hf_shape(directory: Path, tensor_parallel: int = 1) -> KvShape | None:
    """Return the shape of a Hugging Face directory's model over all GPUs of a worker; None when not known.

    KV heads that do not divide by ``tensor_parallel`` GPUs are kept more than once; MLA's latent vector is
    kept on each.
    """
    config = _read_object(directory / "config.json")
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    layers, heads = _positive(config.get("num_hidden_layers")), _positive(config.get("num_attention_heads"))
    if not 0 < layers <= MAX_LAYERS or not heads:
        return None
    kv_heads = _positive(config.get("num_key_value_heads")) or heads
    dim = _positive(config.get("head_dim")) or _positive(config.get("hidden_size")) // heads
    latent = _positive(config.get("kv_lora_rank"))
    latent += _positive(config.get("qk_rope_head_dim")) if latent else 0
    if not dim and not latent:
        return None
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    is_exact = str(config.get("model_type")) in FULL_ATTENTION_ARCHITECTURES and not has_window and not latent
    kept = max(kv_heads, tensor_parallel)
    trained = _positive(config.get("max_position_embeddings"))
    return KvShape((kept,) * layers, dim, dim, latent * tensor_parallel, trained, is_exact)


def hf_weights_bytes(directory: Path) -> int:
    """Return the size of the weights in bytes: as the index has it, else of the files; 0 without any."""
    total = _read_object(directory / "model.safetensors.index.json").get("metadata")
    if isinstance(total, Mapping) and _positive(total.get("total_size"), 2**63):
        return _positive(total.get("total_size"), 2**63)
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin"):
        try:
            if sizes := [each.stat().st_size for each in directory.glob(pattern)]:
                return sum(sizes)
        except OSError:
            continue
    return 0


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _positive(value: Any, maximum: int = MAX_DIMENSION) -> int:
    """Return a whole number from 1 on; 0 for anything else."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_number and 0 < value <= maximum else 0


def _per_layer(value: Any, layers: int) -> tuple[int, ...]:
    """Return a number for each layer; ``value`` is one for all, or one for each. Empty when it is neither."""
    if not 0 < layers <= MAX_LAYERS:
        return ()
    if isinstance(value, tuple):
        return tuple(map(_positive, value)) if len(value) == layers else ()
    return (_positive(value),) * layers if _positive(value) else ()


Options = Mapping[str, Any]

MEMORY_REDUCING_OPTIONS = (
    "quantization",
    "cpu-offload-gb",
    "hf-overrides",
    "load-format",
    "kv-cache-memory-bytes",
)
"""Options of vLLM with which it may take less than the model's files say."""

DEFAULT_MEMORY_FRACTION = 0.9
"""The part of a GPU's memory that vLLM, and about that SGLang, takes by default."""


def memory_need(engine: str, options: Options, gpus: float) -> MemoryNeed | None:
    """Return what one worker takes; None for a model whose files are not here or do not tell it."""
    options = effective_options(options)
    kind, model = model_kind(engine), options.get("model")
    if not kind or not isinstance(model, str):
        return None
    path = Path(os.path.expanduser(model))
    if kind == GGUF_FILE:
        return _llamacpp_need(path, options, gpus)
    return _hf_need(engine_kind(engine), path, options, gpus) if kind == DIRECTORY and path.is_dir() else None


def _memory_fraction(options: Options, gpus: float) -> float:
    """Return the part of its GPUs' memory that a worker may take: as set, else the default of its share."""
    names = ("gpu-memory-utilization", "mem-fraction-static")
    given = next((options[name] for name in names if options.get(name) is not None), None)
    return float(given) if isinstance(given, int | float) else DEFAULT_MEMORY_FRACTION * min(1.0, gpus)


def _llamacpp_need(path: Path, options: Options, gpus: float) -> MemoryNeed | None:
    """Return the need of a GGUF model: weights and the KV entries of all slots; None where not known.

    llama.cpp allocates and clears these entries when it starts.
    """
    from dynaplan.engines.llamacpp.launch_line import read_options

    shape = gguf_shape(path)
    if shape is None:
        return None
    key_bytes, value_bytes = (TYPE_BYTES.get(str(options.get(f"cache-type-{k}") or "f16")) for k in "kv")
    if key_bytes is None or value_bytes is None:
        return None
    token_bytes, weights_bytes = shape.bytes_per_token(key_bytes, value_bytes), gguf_weights_bytes(path)
    if options.get(COMMAND):
        context = options.get("ctx-size")
        tokens = context if isinstance(context, int) and context > 0 else shape.trained_tokens
        return MemoryNeed(weights_bytes, token_bytes, tokens, context_option="ctx-size")
    checked = read_options(options, gpus)
    # ctx-size is the context of all requests together.
    context_option = next((name for name in ("ctx-size", "c", "n-ctx") if name in options), "max-model-len")
    parts = checked.slots if context_option == "max-model-len" else 1
    return MemoryNeed(
        weights_bytes,
        token_bytes,
        (checked.context_tokens or shape.trained_tokens) // parts,
        parts,
        shape.is_exact,
        min(1.0, gpus or 1.0),
        context_option,
    )


def _hf_need(engine: EngineKind, path: Path, options: Options, gpus: float) -> MemoryNeed | None:
    """Estimate the need of a Hugging Face checkpoint: weights, and KV entries of one request of full context.

    None if its configuration or its weights cannot be read. It is certain only for an engine that refuses
    to start without that room; others only slow down.
    """
    shape = hf_shape(path, tensor_parallel_size(options, gpus))
    context, weights_bytes = options.get("max-model-len"), hf_weights_bytes(path)
    is_given = isinstance(context, int) and context > 0
    if shape is None or not weights_bytes or not (is_given or shape.trained_tokens):
        return None
    copies = data_parallel_size(options)
    value_bytes = 1.0 if "8" in str(options.get("kv-cache-dtype") or "") else 2.0
    is_certain = (
        engine.needs_whole_context
        and shape.is_exact
        and is_given
        and not any(map(options.get, MEMORY_REDUCING_OPTIONS))
    )
    tokens = int(context) if is_given and context else shape.trained_tokens
    token_bytes = shape.bytes_per_token(value_bytes, value_bytes) * copies
    return MemoryNeed(
        weights_bytes * copies, token_bytes, tokens, 1, is_certain, _memory_fraction(options, gpus)
    )
