"""The memory that one worker of each engine takes, by its options and its model's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynaplan.config.parallelism import data_parallel_size, tensor_parallel_size
from dynaplan.engines.common.model_files import DIRECTORY, GGUF_FILE, MODEL_KINDS
from dynaplan.engines.common.model_shapes import gguf_shape, gguf_weights_bytes, hf_shape, hf_weights_bytes
from dynaplan.engines.timing_model.kv_memory import TYPE_BYTES, MemoryNeed

Options = Mapping[str, Any]

REDUCING = ("quantization", "cpu-offload-gb", "hf-overrides", "load-format", "kv-cache-memory-bytes")
"""Options of vLLM with which it may take less than the model's files say."""

USUAL_FRACTION = 0.9
"""The part of a GPU's memory that vLLM, and about that SGLang, takes unless told otherwise."""


def memory_need(engine: str, options: Options, gpus: float) -> MemoryNeed | None:
    """Return what one worker takes; None for a model whose files are not here or do not tell it."""
    kind, model = MODEL_KINDS.get(engine), options.get("model")
    if kind is None or not isinstance(model, str):
        return None
    path = Path(model).expanduser()
    if kind == GGUF_FILE:
        return _of_llamacpp(path, options, gpus)
    return _of_directory(engine, path, options, gpus) if kind == DIRECTORY and path.is_dir() else None


def _fraction(options: Options, gpus: float) -> float:
    """Return the part of its GPUs' memory that a worker may take; a share of a GPU is a part of it."""
    names = ("gpu-memory-utilization", "mem-fraction-static")
    given = next((options[name] for name in names if options.get(name) is not None), None)
    return float(given) if isinstance(given, int | float) else USUAL_FRACTION * min(1.0, gpus)


def _of_llamacpp(path: Path, options: Options, gpus: float) -> MemoryNeed | None:
    """llama.cpp allocates and clears the KV entries of all slots when it starts."""
    from dynaplan.engines.llamacpp.options import read_options

    shape = gguf_shape(path)
    if shape is None:
        return None
    checked = read_options(options, gpus)
    key_bytes, value_bytes = (TYPE_BYTES.get(str(options.get(f"cache-type-{k}") or "f16")) for k in "kv")
    if key_bytes is None or value_bytes is None:
        return None
    return MemoryNeed(
        gguf_weights_bytes(path),
        shape.bytes_per_token(key_bytes, value_bytes),
        checked.context_tokens // checked.slots,
        checked.slots,
        shape.is_exact,
        min(1.0, gpus or 1.0),
    )


def _of_directory(engine: str, path: Path, options: Options, gpus: float) -> MemoryNeed | None:
    """vLLM refuses to start without room for one request of the longest context; others only slow down."""
    shape = hf_shape(path, tensor_parallel_size(options, gpus))
    context, weights_bytes = options.get("max-model-len"), hf_weights_bytes(path)
    is_given = isinstance(context, int) and context > 0
    if shape is None or not weights_bytes or not (is_given or shape.trained_tokens):
        return None
    copies = data_parallel_size(options)
    value_bytes = 1.0 if "8" in str(options.get("kv-cache-dtype") or "") else 2.0
    is_certain = engine == "vllm" and shape.is_exact and is_given and not any(map(options.get, REDUCING))
    tokens = int(context) if is_given and context else shape.trained_tokens
    token_bytes = shape.bytes_per_token(value_bytes, value_bytes) * copies
    return MemoryNeed(weights_bytes * copies, token_bytes, tokens, 1, is_certain, _fraction(options, gpus))
