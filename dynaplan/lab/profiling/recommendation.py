"""The tensor parallel sizes to serve with, and the load planner's thresholds, chosen by measurements.

Source of choice, thresholds and lines: Dynamo's profile_sla (0.2.1 to 0.5), in ``benchmarks/profiler``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynaplan.engines.timing_model.step_timing import MeasuredProfile
from dynaplan.lab.profiling.measurements import (
    DecodeMeasurement,
    Measurements,
    PrefillMeasurement,
    measured_profile,
)
from dynaplan.util.errors import ConfigError

MIN_PREFILL_POINTS = 4
"""The number of prompt lengths that cubic interpolation needs."""

LENGTH_TOLERANCE = 0.05
"""The largest difference at which a measured length counts as that of the target, a part of it."""

MIN_BOUND = 0.1
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


@dataclass(frozen=True)
class Recommendation:
    """The sizes and thresholds to serve with, and why.

    ``profile`` holds the measurements of the two chosen sizes. ``lines`` are for the log, in the words of
    Dynamo's profiler; ``notes`` are warnings beyond them.
    """

    goal: Goal
    prefill: PrefillChoice
    decode: DecodeChoice
    prefill_queue: Bounds
    decode_kv: Bounds
    profile: MeasuredProfile
    lines: tuple[str, ...]
    notes: tuple[str, ...]


def recommend(
    measurements: Sequence[Measurements], isl: int, osl: int, ttft_ms: float, itl_ms: float
) -> Recommendation:
    """Choose the sizes that give the most throughput per GPU within the targets, and the thresholds.

    ``isl`` and ``osl`` are in tokens. Raises ConfigError where nothing was measured at these lengths, or
    too little of the chosen sizes for a profile.
    """
    goal = Goal(isl, osl, ttft_ms, itl_ms)
    prefill, meets_ttft = best_prefill(prefill_choices(measurements, goal), ttft_ms)
    decode, meets_itl = best_decode(decode_choices(measurements, goal), itl_ms)
    profile = measured_profile(measurements, prefill.tensor_parallel_size, decode.tensor_parallel_size)
    queue, kv_usage = queue_bounds(prefill.ttft_ms, ttft_ms), kv_bounds(decode.kv_usage)
    return Recommendation(
        goal,
        prefill,
        decode,
        queue,
        kv_usage,
        profile,
        tuple(_lines(prefill, meets_ttft, queue, decode, meets_itl, kv_usage)),
        (*_missed_targets(prefill, decode, goal), *_notes(profile, meets_ttft)),
    )


def _lines(
    prefill: PrefillChoice,
    meets_ttft: bool,
    queue: Bounds,
    decode: DecodeChoice,
    meets_itl: bool,
    kv_usage: Bounds,
) -> Iterator[str]:
    yield "Analyzing results and generate recommendations..."
    if not meets_ttft:
        yield _UNREACHABLE.format("TTFT")
    yield (
        f"Suggested prefill TP:{prefill.tensor_parallel_size} (TTFT {prefill.ttft_ms:.2f} ms, "
        f"throughput {prefill.tokens_per_s_per_gpu:.2f} tokens/s/GPU)"
    )
    yield f"Suggested planner upper/lower bound for prefill queue size: {queue.upper:.2f}/{queue.lower:.2f}"
    if not meets_itl:
        yield _UNREACHABLE.format("ITL")
    yield (
        f"Suggested decode TP:{decode.tensor_parallel_size} (ITL {decode.itl_ms:.2f} ms, "
        f"throughput {decode.tokens_per_s_per_gpu:.2f} tokens/s/GPU)"
    )
    yield (
        "Suggested planner upper/lower bound for decode kv cache utilization: "
        f"{kv_usage.upper:.2f}/{kv_usage.lower:.2f}"
    )


_UNREACHABLE = (
    "No TP size satisfies the {} requirement, please try a smaller model or a more powerful GPU SKU"
)


def _missed_targets(prefill: PrefillChoice, decode: DecodeChoice, goal: Goal) -> Iterator[str]:
    for name, found_ms, target_ms in (
        ("TTFT", prefill.ttft_ms, goal.ttft_ms),
        ("ITL", decode.itl_ms, goal.itl_ms),
    ):
        if found_ms > target_ms:
            yield (
                f"missed target: {name} is {found_ms:.0f} ms at best, {found_ms / target_ms:.1f} times "
                f"what is asked for ({target_ms:g} ms); no number of workers mends that"
            )


def _notes(profile: MeasuredProfile, meets_ttft: bool) -> Iterator[str]:
    if not meets_ttft:
        yield (
            "the bounds for the prefill queue are the least ones: even a prompt that waits for nobody is late"
        )
    lengths = len(profile.prefill_isl)
    if lengths < MIN_PREFILL_POINTS:
        yield (
            f"the profile has {lengths} prompt lengths: enough for sizing by queueing and for the simulated "
            f"engine, too few for 'sizing: formula', which needs {MIN_PREFILL_POINTS}"
        )
    loads = list(zip(profile.y_context_length, profile.x_kv_usage, strict=True))
    contexts = {context for context, _ in loads}
    if len(contexts) < 2 or len(loads) == len(contexts):
        yield (
            "the profile has decode points at one context, or one load at each: ITL is known along a line "
            "only, too little for 'sizing: formula'"
        )


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
    upper, lower = (max(MIN_BOUND, target_ms * factor / ttft_ms - 1) for factor in (QUEUE_UP, QUEUE_DOWN))
    return Bounds(lower if round(lower, 2) < round(upper, 2) else upper / 2, upper)


def kv_bounds(kv_usage: float) -> Bounds:
    """Return the chosen load's KV usage, 0.2 less and 0.2 more, within 0.1 and 1."""
    return Bounds(max(MIN_BOUND, kv_usage - KV_MARGIN), min(1.0, kv_usage + KV_MARGIN))


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
    return abs(tokens - wanted_tokens) <= LENGTH_TOLERANCE * wanted_tokens
