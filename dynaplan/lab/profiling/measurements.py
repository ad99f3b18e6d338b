"""Measurements of an engine by profile-sla, one configuration at a time, and the profile that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from dynaplan.engines.timing_model.step_timing import MeasuredProfile
from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class PrefillMeasurement:
    """The TTFT of one prompt alone in the engine, none of it in the prefix cache."""

    isl_tokens: int
    ttft_ms: float

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PrefillMeasurement:
        """Read what ``asdict`` returns; raises ConfigError, naming the wrong field."""
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

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> DecodeMeasurement:
        """Read what ``asdict`` returns; raises ConfigError, naming the wrong field."""
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


NEAR_STEPS = 0.25
"""The part of the mean distance below which two prompt lengths are one: noise would bend a curve."""

NEAR_LOADS = 0.05
"""The part by which contexts, and KV usages at one context, may differ and still be one."""


def measured_profile(
    measurements: Sequence[Measurements], prefill_size: int, decode_size: int
) -> MeasuredProfile:
    """Join the prefill half of one tensor parallel size and the decode half of another, or of the same.

    A decode point stands at the mean context of its requests, ``isl + osl / 2``, and the part of the KV
    cache that they fill with it. Points that are nearly the same are averaged. Raises ConfigError when
    there are fewer than two prompt lengths, or no decode point.
    """
    prefill = _measured_at(measurements, prefill_size)
    decode = _measured_at(measurements, decode_size)
    prompts = list(_prompts(prefill.prefill))
    loads = list(_loads(decode.decode, decode.max_kv_tokens))
    document = {
        "prefill_isl": [isl for isl, _ in prompts],
        "prefill_ttft": [ttft_ms for _, ttft_ms in prompts],
        "prefill_thpt_per_gpu": [isl / ttft_ms * 1000 / prefill.gpus for isl, ttft_ms in prompts],
        "x_kv_usage": [each.kv_usage for each in loads],
        "y_context_length": [each.context_tokens for each in loads],
        "z_itl": [each.itl_ms for each in loads],
        "z_thpt_per_gpu": [each.tokens_per_s / decode.gpus for each in loads],
        "max_kv_tokens": decode.max_kv_tokens,
    }
    return MeasuredProfile.from_document(document, f"measured at TP {prefill_size} and {decode_size}")


def _measured_at(measurements: Sequence[Measurements], size: int) -> Measurements:
    """Every measurement at that tensor parallel size, in one; raises ConfigError without any."""
    parts = [each for each in measurements if each.tensor_parallel_size == size]
    if not parts:
        raise ConfigError(f"nothing was measured at tensor parallel size {size}")
    return replace(
        parts[0],
        prefill=tuple(point for part in parts for point in part.prefill),
        decode=tuple(point for part in parts for point in part.decode),
    )


@dataclass(frozen=True)
class _Load:
    kv_usage: float
    context_tokens: float
    itl_ms: float
    tokens_per_s: float


def _prompts(points: Sequence[PrefillMeasurement]) -> Iterator[tuple[float, float]]:
    """(tokens, TTFT in ms), rising, no two nearly at the same length."""
    lengths = {each.isl_tokens for each in points}
    near_tokens = NEAR_STEPS * (max(lengths) - min(lengths)) / (len(lengths) - 1) if len(lengths) > 1 else 0.0
    for group in _groups(points, lambda each: each.isl_tokens, lambda _: near_tokens):
        yield fmean(each.isl_tokens for each in group), fmean(each.ttft_ms for each in group)


def _loads(points: Sequence[DecodeMeasurement], max_kv_tokens: int) -> Iterator[_Load]:
    """The decode points by rows of one context, and in a row by KV usage."""
    loads = [_load(each, max_kv_tokens) for each in points]
    for row in _groups(loads, lambda each: each.context_tokens, _nearby):
        context_tokens = fmean(each.context_tokens for each in row)
        for group in _groups(row, lambda each: each.kv_usage, _nearby):
            yield _Load(
                fmean(each.kv_usage for each in group),
                context_tokens,
                fmean(each.itl_ms for each in group),
                fmean(each.tokens_per_s for each in group),
            )


def _load(point: DecodeMeasurement, max_kv_tokens: int) -> _Load:
    context_tokens = point.isl_tokens + point.osl_tokens / 2
    usage = min(1.0, point.concurrency * context_tokens / max_kv_tokens)
    return _Load(usage, context_tokens, point.itl_ms, point.output_tokens_per_s)


def _nearby(value: float) -> float:
    return NEAR_LOADS * value


Point = TypeVar("Point")


def _groups(
    points: Sequence[Point], value: Callable[[Point], float], nearby: Callable[[float], float]
) -> Iterator[list[Point]]:
    """Sort the points, and split them into runs whose values are near that of the run's first point."""
    run: list[Point] = []
    for point in sorted(points, key=value):
        if run and value(point) - value(run[0]) > nearby(value(run[0])):
            yield run
            run = []
        run.append(point)
    if run:
        yield run
