"""Engines whose timing is known, and what a perfect sweep measures of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynaplan.engines.timing_model.step_timing import FITTED, StepTiming, mocker_timing
from dynaplan.lab.profiling.load_points import (
    DecodeLoad,
    decode_points,
    prefill_lengths,
    selection_concurrencies,
)
from dynaplan.lab.profiling.measurements import DecodeMeasurement, Measurements, PrefillMeasurement
from dynaplan.lab.profiling.recommendation import Recommendation, recommend

CONTEXT_TOKENS = 16_384
KV_TOKENS = 400_000
SLOTS = 256
LARGE_KV_TOKENS = 1_000_000
"""Of engines that are compared."""

TIMINGS: Mapping[str, StepTiming] = {
    "mocker": mocker_timing(KV_TOKENS),
    **{name: fitted.timing() for name, fitted in FITTED.items()},
}


def decoding(timing: StepTiming, load: DecodeLoad) -> DecodeMeasurement:
    """The ITL is linear over an answer, so its mean is that of the mean context."""
    context_tokens = load.isl_tokens + load.osl_tokens / 2
    itl_ms = timing.decode_ms(load.concurrency, load.concurrency * context_tokens)
    return DecodeMeasurement(*load, itl_ms, load.concurrency * 1000 / itl_ms)


def swept(
    timing: StepTiming,
    *,
    max_kv_tokens: int = KV_TOKENS,
    prefill_granularity: int = 16,
    decode_granularity: int = 6,
    size: int = 1,
    isl: int = 3000,
    osl: int = 500,
) -> Measurements:
    """The whole sweep: the points of the target, and those of the curves."""
    lengths = (isl, *prefill_lengths(CONTEXT_TOKENS, prefill_granularity))
    loads = [
        *(DecodeLoad(isl, osl, each) for each in selection_concurrencies(max_kv_tokens, isl, osl, SLOTS)),
        *decode_points(CONTEXT_TOKENS, max_kv_tokens, decode_granularity, osl, SLOTS),
    ]
    return measurements(timing, lengths, loads, size=size, max_kv_tokens=max_kv_tokens)


def measurements(
    timing: StepTiming,
    lengths: Sequence[int],
    loads: Sequence[DecodeLoad],
    *,
    size: int = 1,
    max_kv_tokens: int = KV_TOKENS,
) -> Measurements:
    """Those prompts and those loads."""
    prefill = tuple(PrefillMeasurement(isl, timing.prefill_ms(isl)) for isl in lengths)
    decode = tuple(decoding(timing, load) for load in dict.fromkeys(loads))
    return Measurements(size, size, max_kv_tokens, prefill, decode)


def of_sizes(
    prefill: Mapping[int, float], decode: Mapping[int, Sequence[tuple[int, float, float]]]
) -> list[Measurements]:
    """TP size -> TTFT (ms) of 3000 tokens; TP size -> (concurrency, ITL in ms, tokens/s per GPU)."""
    return [
        Measurements(
            size,
            size,
            LARGE_KV_TOKENS,
            (PrefillMeasurement(100, ttft_ms / 20), PrefillMeasurement(3000, ttft_ms)),
            tuple(
                DecodeMeasurement(3000, 500, concurrency, itl_ms, per_gpu * size)
                for concurrency, itl_ms, per_gpu in decode[size]
            ),
        )
        for size, ttft_ms in prefill.items()
    ]


def recommended(measured: Sequence[Measurements], ttft_ms: float, itl_ms: float) -> Recommendation:
    """For prompts of 3000 and answers of 500 tokens."""
    return recommend(measured, 3000, 500, ttft_ms, itl_ms)
