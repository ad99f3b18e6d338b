"""llama-server's flags as fields of xllamacpp's ``CommonParams``, for a llama.cpp without that program.

A flag that is not listed is the field of its name (``n-keep`` is ``n_keep``), so that all fields can be set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from dynaplan.engines.llamacpp.server_main import set_field
from dynaplan.util.errors import ConfigError, nearest

FIELDS: Mapping[str, str] = {
    "threads": "cpuparams.n_threads",
    "threads-batch": "cpuparams_batch.n_threads",
    "threads-http": "n_threads_http",
    "prio": "cpuparams.priority",
    "prio-batch": "cpuparams_batch.priority",
    "batch-size": "n_batch",
    "ubatch-size": "n_ubatch",
    "cache-ram": "cache_ram_mib",
    "cache-reuse": "n_cache_reuse",
    "context-shift": "ctx_shift",
    "ctx-checkpoints": "n_ctx_checkpoints",
    "embeddings": "embedding",
    "fit": "fit_params",
    "fit-ctx": "fit_params_min_ctx",
    "jinja": "use_jinja",
    "keep": "n_keep",
    "mmproj": "mmproj.path",
    "mmproj-offload": "mmproj_use_gpu",
    "override-tensor": "tensor_buft_overrides",
    "props": "endpoint_props",
    "skip-chat-parsing": "force_pure_content_parser",
    "timeout": "timeout_read",
    "model-draft": "speculative.draft.mparams.path",
    "draft-max": "speculative.draft.n_max",
    "draft-min": "speculative.draft.n_min",
    "draft-p-min": "speculative.draft.p_min",
    "n-gpu-layers-draft": "speculative.draft.n_gpu_layers",
    "spec-draft-model": "speculative.draft.mparams.path",
    "spec-draft-n-max": "speculative.draft.n_max",
    "spec-draft-n-min": "speculative.draft.n_min",
    "spec-draft-p-min": "speculative.draft.p_min",
    "reasoning-budget": "sampling.reasoning_budget_tokens",
    "seed": "sampling.seed",
    "temp": "sampling.temp",
    "top-k": "sampling.top_k",
    "top-p": "sampling.top_p",
    "min-p": "sampling.min_p",
    "typical-p": "sampling.typ_p",
    "repeat-last-n": "sampling.penalty_last_n",
    "repeat-penalty": "sampling.penalty_repeat",
    "presence-penalty": "sampling.penalty_present",
    "frequency-penalty": "sampling.penalty_freq",
    "dry-multiplier": "sampling.dry_multiplier",
    "dry-base": "sampling.dry_base",
    "dry-allowed-length": "sampling.dry_allowed_length",
    "dry-penalty-last-n": "sampling.dry_penalty_last_n",
    "xtc-probability": "sampling.xtc_probability",
    "xtc-threshold": "sampling.xtc_threshold",
    "dynatemp-range": "sampling.dynatemp_range",
    "dynatemp-exp": "sampling.dynatemp_exponent",
    "mirostat": "sampling.mirostat",
    "mirostat-lr": "sampling.mirostat_eta",
    "mirostat-ent": "sampling.mirostat_tau",
    "ignore-eos": "sampling.ignore_eos",
}
"""The flags whose field has another name."""

OPPOSITES: Mapping[str, str] = {
    "kv-offload": "no_kv_offload",
    "op-offload": "no_op_offload",
    "perf": "no_perf",
    "repack": "no_extra_bufts",
}
"""The flags whose field says the opposite."""

ENUMS: Mapping[str, tuple[str, str]] = {
    "split-mode": ("split_mode", "LLAMA_SPLIT_MODE_"),
    "flash-attn": ("flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
    "cache-type-k": ("cache_type_k", "GGML_TYPE_"),
    "cache-type-v": ("cache_type_v", "GGML_TYPE_"),
    "load-mode": ("load_mode", "LLAMA_LOAD_MODE_"),
    "pooling": ("pooling_type", "LLAMA_POOLING_TYPE_"),
    "rope-scaling": ("rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_"),
    "numa": ("numa", "GGML_NUMA_STRATEGY_"),
    "reasoning-format": ("reasoning_format", "COMMON_REASONING_FORMAT_"),
}
"""The flags whose field is an enum, and how the names of its members begin: then comes the value."""

MEMBERS: Mapping[tuple[str, Any], str] = {
    ("flash-attn", "on"): "ENABLED",
    ("flash-attn", "off"): "DISABLED",
    ("load-mode", "dio"): "DIRECT_IO",
}
"""The values that are not called like their member."""

SWITCHED: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("mlock", True): {"load_mode": "LLAMA_LOAD_MODE_MLOCK"},
    ("mlock", False): {},
    ("mmap", True): {},
    ("mmap", False): {"load_mode": "LLAMA_LOAD_MODE_NONE"},
    ("reranking", True): {"embedding": True, "pooling_type": "LLAMA_POOLING_TYPE_RANK"},
    ("reranking", False): {},
    ("n-gpu-layers", "auto"): {"n_gpu_layers": -1},
    ("n-gpu-layers", "all"): {"n_gpu_layers": -2},
    ("fit", "on"): {"fit_params": True},
    ("fit", "off"): {"fit_params": False},
}
"""What single values of flags are in fields."""

DEVICES = 128
"""The numbers in the field ``tensor_split``."""


def fields_of(flag: str, value: Any) -> dict[str, Any]:
    """Return the fields, dotted, and their JSON values that a flag with that value sets."""
    if isinstance(value, str | bool) and (flag, value) in SWITCHED:
        return dict(SWITCHED[flag, value])
    if flag in ENUMS:
        field, prefix = ENUMS[flag]
        return {field: prefix + MEMBERS.get((flag, value), str(value).upper().replace("+", "_"))}
    if flag in OPPOSITES:
        return {OPPOSITES[flag]: not value}
    if flag == "tensor-split":
        return {"tensor_split": _tensor_split(value)}
    if flag == "chat-template-file":
        return {"chat_template": _text_of(flag, value)}
    return {FIELDS.get(flag, flag.replace("-", "_")): value}


def _tensor_split(value: Any) -> list[float]:
    parts = value if isinstance(value, list | tuple) else str(value).replace("/", ",").split(",")
    try:
        given = [float(part) for part in parts]
    except ValueError:
        raise ConfigError(f"tensor-split is {value!r}", hint="Expected numbers, such as 3,1.") from None
    return [*given, *[0.0] * (DEVICES - len(given))]


def _text_of(flag: str, path: Any) -> str:
    try:
        return Path(os.path.expanduser(str(path))).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} is {path!r}: {error}", hint="Expected a file of text.") from None


def check_fields(flags: Mapping[str, Any], params: Any) -> None:
    """Raise ConfigError for a flag that ``params``, a ``CommonParams``, has no field or member for."""
    for flag, given in flags.items():
        for field, value in fields_of(flag, given).items():
            _check_field(params, flag, given, field, value)


def _check_field(params: Any, flag: str, given: Any, field: str, value: Any) -> None:
    try:
        set_field(params, field, value)
    except AttributeError:
        hint = LLAMACPP_INSTEAD.get(flag) or _nearest_field(params, flag)
        raise ConfigError(f"{flag} is no setting of xllamacpp", hint=hint) from None
    except KeyError:
        prefix = ENUMS[flag][1] if flag in ENUMS else ""
        names = ", ".join(
            each.removeprefix(prefix).lower() for each in type(getattr(params, field)).__members__
        )
        raise ConfigError(f"{flag} is {given!r}", hint=f"Expected one of: {names}.") from None
    except (TypeError, ValueError, OverflowError) as error:
        expected = type(reduce(getattr, field.split("."), params)).__name__
        raise ConfigError(f"{flag} is {given!r}: {error}", hint=f"Expected {expected}.") from error


_IN_THE_FILE = "It is vLLM's; a GGUF file says it itself."

LLAMACPP_INSTEAD: Mapping[str, str] = {
    "gpu-memory-utilization": "It is vLLM's; llama.cpp has n-gpu-layers: the layers on the GPU, -1 for all.",
    "cpu-offload-gb": "It is vLLM's; llama.cpp has n-gpu-layers: all further layers stay on the CPU.",
    "kv-cache-dtype": "It is vLLM's; llama.cpp has cache-type-k and cache-type-v: f16, q8_0, q4_0 ...",
    "enforce-eager": "It is vLLM's, and there is nothing like it here: leave it out.",
    "swap-space": "It is vLLM's, and there is nothing like it here: leave it out.",
    "enable-chunked-prefill": "It is vLLM's; llama.cpp always divides prompts, by max-num-batched-tokens.",
    "num-gpu-blocks-override": "It is vLLM's; the KV cache has room for max-num-seqs times max-model-len.",
    **dict.fromkeys(("dtype", "quantization", "tokenizer", "load-format", "trust-remote-code"), _IN_THE_FILE),
}
"""vLLM's options that llama.cpp lacks, and the ones that do the same."""


def _nearest_field(params: Any, flag: str) -> str:
    fields = {each.replace("_", "-") for each in dir(params) if not each.startswith("_")}
    near = nearest(flag, {*fields, *FIELDS, *OPPOSITES, *ENUMS, "max-num-batched-tokens", "ctx-size"})
    also = "If it is a flag of llama-server, install that program: llama-server: true."
    return f"{near} {also}" if near.startswith("Did you") else also
