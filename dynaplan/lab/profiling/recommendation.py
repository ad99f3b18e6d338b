"""The recommendation that follows from measurements, with the lines of Dynamo's profile_sla."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynaplan.engines.timing_model.timing import MeasuredProfile
from dynaplan.lab.profiling.measured_profile import measured_profile
from dynaplan.lab.profiling.measurements import Measurements
from dynaplan.lab.profiling.selection import (
    Bounds,
    DecodeChoice,
    Goal,
    PrefillChoice,
    best_decode,
    best_prefill,
    decode_choices,
    kv_bounds,
    prefill_choices,
    queue_bounds,
)

LEAST_PREFILL_POINTS = 4
"""The number of prompt lengths that cubic interpolation needs."""


@dataclass(frozen=True)
class Recommendation:
    """The sizes and thresholds to serve with, and why.

    ``profile`` holds the measurements of the two chosen sizes. ``lines`` are for the log, in the original's
    words; ``notes`` are warnings beyond them.
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
        tuple(_notes(profile, meets_ttft)),
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


def _notes(profile: MeasuredProfile, meets_ttft: bool) -> Iterator[str]:
    if not meets_ttft:
        yield (
            "the bounds for the prefill queue are the least ones: even a prompt that waits for nobody is late"
        )
    lengths = len(profile.prefill_isl)
    if lengths < LEAST_PREFILL_POINTS:
        yield (
            f"the profile has {lengths} prompt lengths: enough for sizing by queueing and for the simulated "
            f"engine, too few for 'sizing: formula', which needs {LEAST_PREFILL_POINTS}"
        )
    loads = list(zip(profile.y_context_length, profile.x_kv_usage, strict=True))
    contexts = {context for context, _ in loads}
    if len(contexts) < 2 or len(loads) == len(contexts):
        yield (
            "the profile has decode points at one context, or one load at each: ITL is known along a line "
            "only, too little for 'sizing: formula'"
        )
