"""What is known of a model by its files, for clients that list models: size, age, digest, kind.

A GGUF file says the most, in its header. A directory of Hugging Face says its size; a name on the hub, and a
simulated engine's, nothing. The whole file is never read: its digest is the SHA-256 of its content only where
its name has it, as in the caches of Ollama and Hugging Face. Else it is that of where, how large and how old
the file is, and of how it begins: so it stays the same until the file changes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaplan.config.command_words import engine_command
from dynaplan.engines.gguf import ModelDescription, read_description
from dynaplan.engines.model_files import gguf_parts
from dynaplan.engines.model_memory import gguf_weights_bytes, hf_weights_bytes

DIGEST_NAME = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
"""A file that is named by the SHA-256 of its content."""

HEAD_BYTES = 64 * 1024

FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}
"""The quantization by ``general.file_type``: llama.cpp's ``llama_ftype``."""

_FILL_IN_KEYS = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")


@dataclass(frozen=True)
class ModelFacts:
    """What clients are told of a model; what is not known is empty or 0. ``digest`` has 64 hex digits.

    ``capabilities`` are Ollama's words. ``metadata`` are the keys of a GGUF file, which is the ``format``.
    """

    digest: str
    size_bytes: int = 0
    modified_unix_s: float = 0.0
    format: str = ""
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    chat_template: str = ""
    capabilities: tuple[str, ...] = ("completion",)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def model_path(options: Mapping[str, Any]) -> Path | None:
    """Return the file or directory of the model that a worker with these options serves; None without one."""
    found = engine_command(options)
    named = found.model if found else options.get("model")
    path = Path(str(named)) if named else None
    return path if path and path.exists() else None


def read_facts(name: str, options: Mapping[str, Any]) -> ModelFacts:
    """Return what is known of the model of that name, by its files and its worker's options.

    Never raises OSError.
    """
    path = model_path(options)
    try:
        if path is None:
            return ModelFacts(_digest(name.encode()), capabilities=_capabilities(ModelDescription(), options))
        status = path.stat()
        if path.is_dir():
            size_bytes = hf_weights_bytes(path)
            identity = f"{path.resolve()} {size_bytes} {status.st_mtime_ns}"
            return ModelFacts(_digest(identity.encode()), size_bytes, status.st_mtime, "safetensors")
        return _gguf_facts(path, status.st_mtime, options)
    except OSError:
        return ModelFacts(_digest(name.encode()))


def _gguf_facts(path: Path, modified_unix_s: float, options: Mapping[str, Any]) -> ModelFacts:
    described = read_description(path)
    metadata = described.metadata
    file_type = metadata.get("general.file_type")
    return ModelFacts(
        _file_digest(path),
        gguf_weights_bytes(path) or path.stat().st_size,
        modified_unix_s,
        "gguf",
        str(metadata.get("general.architecture") or ""),
        described.parameters if len(gguf_parts(path)) == 1 else 0,
        FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else "",
        described.chat_template,
        _capabilities(described, options),
        metadata,
    )


def _file_digest(path: Path) -> str:
    real = path.resolve()
    if found := DIGEST_NAME.fullmatch(real.name):
        return found[1]
    status = real.stat()
    with real.open("rb") as file:
        return _digest(f"{real} {status.st_size} {status.st_mtime_ns} ".encode() + file.read(HEAD_BYTES))


def _digest(identity: bytes) -> str:
    return hashlib.sha256(identity).hexdigest()


def _capabilities(described: ModelDescription, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the model can do, by its header, its chat template, and how its worker is started."""
    architecture = described.metadata.get("general.architecture")
    command = engine_command(options)
    given = {**options, **(command.flags if command else {})}
    is_embedding = bool(
        f"{architecture}.pooling_type" in described.metadata
        or given.get("embedding")
        or given.get("embeddings")
    )
    template = described.chat_template
    found = {
        "embedding": is_embedding,
        "completion": not is_embedding,
        "tools": "tools" in template,
        "insert": any(key in described.metadata for key in _FILL_IN_KEYS),
        "vision": any(given.get(name) for name in ("mmproj", "mmproj-url")),
        "thinking": "<think>" in template or "enable_thinking" in template,
    }
    return tuple(name for name, is_there in found.items() if is_there)
