"""Measurements of an engine by profile-sla, one configuration at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class PrefillMeasurement:
    """The TTFT of one prompt alone in the engine, none of it in the prefix cache."""

    isl_tokens: int
    ttft_ms: float

    def to_document(self) -> dict[str, Any]:
        """Map each field's name to its value, for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PrefillMeasurement:
        """Read ``to_document``'s form; raises ConfigError, naming the wrong field."""
        return cls(_whole(document, "isl_tokens"), _number(document, "ttft_ms"))


@dataclass(frozen=True)
class DecodeMeasurement:
    """The mean ITL of ``concurrency`` requests that decode together, and the throughput of the engine.

    Their prompts of ``isl_tokens`` are in the prefix cache, so that no prompt is computed beside them. Each
    answer has ``osl_tokens``. ``output_tokens_per_s`` is of the whole engine, not of one request or GPU.
    """

    isl_tokens: int
    osl_tokens: int
    concurrency: int
    itl_ms: float
    output_tokens_per_s: float

    def to_document(self) -> dict[str, Any]:
        """Map each field's name to its value, for JSON."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> DecodeMeasurement:
        """Read ``to_document``'s form; raises ConfigError, naming the wrong field."""
        isl_tokens, osl_tokens, concurrency = (
            _whole(document, key) for key in ("isl_tokens", "osl_tokens", "concurrency")
        )
        itl_ms, output_tokens_per_s = (_number(document, key) for key in ("itl_ms", "output_tokens_per_s"))
        return cls(isl_tokens, osl_tokens, concurrency, itl_ms, output_tokens_per_s)


@dataclass(frozen=True)
class Measurements:
    """Every measurement of an engine at one tensor parallel size.

    ``gpus`` is the number of GPUs of one such worker, which throughput per GPU divides by. ``max_kv_tokens``
    is the number of tokens that its KV cache holds.
    """

    tensor_parallel_size: int
    gpus: int
    max_kv_tokens: int
    prefill: tuple[PrefillMeasurement, ...]
    decode: tuple[DecodeMeasurement, ...]


def _whole(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"a measurement's {key} is {value!r}", hint="Expected a whole number from 1 on.")
    return value


def _number(document: Mapping[str, Any], key: str) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
        raise ConfigError(f"a measurement's {key} is {value!r}", hint="Expected a number above 0.")
    return float(value)
