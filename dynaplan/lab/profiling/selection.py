"""The choice of tensor parallel sizes, and the thresholds of the load planner that follow from it.

Source: Dynamo's profile_sla (0.2.1 to 0.5), in ``benchmarks/profiler``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.lab.profiling.measurements import DecodeMeasurement, Measurements, PrefillMeasurement
from dynaplan.util.errors import ConfigError

NEARLY = 0.05
"""The largest difference at which a measured length counts as that of the target, a part of it."""

LEAST_BOUND = 0.1
"""The smallest threshold, in requests per prefill worker and as a KV usage."""

QUEUE_UP = 1.2
"""TTFT over its target at which the queue of a prefill worker is long enough to scale up."""

QUEUE_DOWN = 0.8
"""TTFT over its target at which the queue of a prefill worker is short enough to scale down."""

KV_MARGIN = 0.2
"""Distance of the KV usage from that of the chosen load at which decode is scaled up or down."""


@dataclass(frozen=True)
class Goal:
    """The lengths to serve, in tokens, and the targets, in ms."""

    isl_tokens: int
    osl_tokens: int
    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True)
class PrefillChoice:
    """The TTFT of a prompt of the goal's length, alone on an engine of one size."""

    tensor_parallel_size: int
    gpus: int
    ttft_ms: float
    tokens_per_s_per_gpu: float


@dataclass(frozen=True)
class DecodeChoice:
    """The ITL of ``concurrency`` requests of the goal's lengths on an engine of one size; usage is 0 to 1."""

    tensor_parallel_size: int
    gpus: int
    concurrency: int
    kv_usage: float
    itl_ms: float
    tokens_per_s_per_gpu: float


@dataclass(frozen=True)
class Bounds:
    """Two thresholds of the load planner: below ``lower`` a worker leaves, above ``upper`` one is added."""

    lower: float
    upper: float


def prefill_choices(measured: Sequence[Measurements], goal: Goal) -> tuple[PrefillChoice, ...]:
    """Return every size measured at the goal's prompt length; ConfigError when none was."""
    choices = tuple(
        PrefillChoice(
            each.tensor_parallel_size,
            each.gpus,
            point.ttft_ms,
            point.isl_tokens / point.ttft_ms * 1000 / each.gpus,
        )
        for each in measured
        for point in _prefill_at(each.prefill, goal)
    )
    if not choices:
        raise ConfigError(
            f"no TTFT was measured of a prompt of {goal.isl_tokens} tokens",
            hint="Expected a measurement for at least one tensor parallel size.",
        )
    return choices


def decode_choices(measured: Sequence[Measurements], goal: Goal) -> tuple[DecodeChoice, ...]:
    """Return every size and concurrency measured at the goal's lengths; ConfigError when none was."""
    choices = tuple(
        DecodeChoice(
            each.tensor_parallel_size,
            each.gpus,
            point.concurrency,
            min(1.0, point.concurrency * (point.isl_tokens + point.osl_tokens / 2) / each.max_kv_tokens),
            point.itl_ms,
            point.output_tokens_per_s / each.gpus,
        )
        for each in measured
        for point in _decode_at(each.decode, goal)
    )
    if not choices:
        raise ConfigError(
            f"no ITL was measured of prompts of {goal.isl_tokens} and answers of {goal.osl_tokens} tokens",
            hint="Expected a measurement for at least one tensor parallel size.",
        )
    return choices


def best_prefill(choices: Sequence[PrefillChoice], ttft_ms: float) -> tuple[PrefillChoice, bool]:
    """Return the choice with the most throughput per GPU within the target, and True.

    When none is within it, the one with the smallest TTFT, and False. Of equals, the one with fewest GPUs.
    """
    meeting = [each for each in choices if each.ttft_ms <= ttft_ms]
    if meeting:
        return max(meeting, key=lambda each: (each.tokens_per_s_per_gpu, -each.gpus)), True
    return min(choices, key=lambda each: (each.ttft_ms, each.gpus)), False


def best_decode(choices: Sequence[DecodeChoice], itl_ms: float) -> tuple[DecodeChoice, bool]:
    """Return the choice with the most throughput per GPU within the target, and True.

    When none is within it, the one with the smallest ITL, and False. Of equals, the one with fewest GPUs.
    """
    meeting = [each for each in choices if each.itl_ms <= itl_ms]
    if meeting:
        return max(meeting, key=lambda each: (each.tokens_per_s_per_gpu, -each.gpus)), True
    return min(choices, key=lambda each: (each.itl_ms, each.gpus)), False


def queue_bounds(ttft_ms: float, target_ms: float) -> Bounds:
    """Return the thresholds of the prefill queue, in requests per prefill worker.

    A prompt that finds ``q`` others waiting takes about ``(q + 1) * ttft_ms``, since prompts are computed one
    after another. The thresholds are the ``q`` for 1.2 and 0.8 times the target, and at
    least 0.1. Where the target is out of reach both would be 0.1, and the planner could follow neither: then
    the lower one is half of the upper one.
    """
    upper, lower = (max(LEAST_BOUND, target_ms * factor / ttft_ms - 1) for factor in (QUEUE_UP, QUEUE_DOWN))
    return Bounds(lower if round(lower, 2) < round(upper, 2) else upper / 2, upper)


def kv_bounds(kv_usage: float) -> Bounds:
    """Return the chosen load's KV usage, 0.2 less and 0.2 more, within 0.1 and 1."""
    return Bounds(max(LEAST_BOUND, kv_usage - KV_MARGIN), min(1.0, kv_usage + KV_MARGIN))


def _prefill_at(points: Sequence[PrefillMeasurement], goal: Goal) -> list[PrefillMeasurement]:
    """The point nearest to the goal's length, if one is near."""
    near = [each for each in points if _is_near(each.isl_tokens, goal.isl_tokens)]
    return sorted(near, key=lambda each: abs(each.isl_tokens - goal.isl_tokens))[:1]


def _decode_at(points: Sequence[DecodeMeasurement], goal: Goal) -> list[DecodeMeasurement]:
    """The points of exactly the goal's lengths; without any, the near ones."""
    exact = [
        each for each in points if each.isl_tokens == goal.isl_tokens and each.osl_tokens == goal.osl_tokens
    ]
    return exact or [
        each
        for each in points
        if _is_near(each.isl_tokens, goal.isl_tokens) and _is_near(each.osl_tokens, goal.osl_tokens)
    ]


def _is_near(tokens: int, wanted_tokens: int) -> bool:
    return abs(tokens - wanted_tokens) <= NEARLY * wanted_tokens
