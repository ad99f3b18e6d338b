"""The plots of a finished profile, as data: what the sizes reach, what a request costs, the chosen curves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from dynaplan.engines.timing_model.step_timing import MeasuredProfile
from dynaplan.lab.drawing.plots import Curve, Plot
from dynaplan.lab.profiling.measurements import Measurements
from dynaplan.lab.profiling.recommendation import (
    DecodeChoice,
    Goal,
    Recommendation,
    decode_choices,
    prefill_choices,
)

PREFILL_DIRECTORY, DECODE_DIRECTORY = "selected_prefill_interpolation", "selected_decode_interpolation"
"""The directories of the chosen size's curves, as in Dynamo's profiler; so are the names of the plots."""

TTFT, ITL = "time to first token (ms)", "inter-token latency (ms)"
"""Labels of the axes of times."""

THROUGHPUT = "throughput (tokens/s/GPU)"
"""The label of the axis of throughput."""

REQUESTS = 1000
"""The number of requests whose cost is shown."""


def plots_of(recommendation: Recommendation, measured: Sequence[Measurements]) -> dict[str, Plot]:
    """Every plot by the path of its file, relative to the output directory and without the suffix."""
    profile = recommendation.profile
    prefill, decode = PREFILL_DIRECTORY, DECODE_DIRECTORY
    return {
        "prefill_performance": _prefill_performance(recommendation, measured),
        "decode_performance": _decode_performance(recommendation, measured),
        "cost_per_request": _cost(recommendation.goal, measured),
        f"{prefill}/prefill_ttft_interpolation": _prefill_curve(profile, TTFT, profile.prefill_ttft),
        f"{prefill}/prefill_throughput_interpolation": _prefill_curve(
            profile, THROUGHPUT, profile.prefill_thpt_per_gpu
        ),
        f"{decode}/decode_itl_interpolation": _decode_curves(profile, ITL, profile.z_itl),
        f"{decode}/decode_throughput_interpolation": _decode_curves(
            profile, THROUGHPUT, profile.z_thpt_per_gpu
        ),
    }


def _prefill_performance(recommendation: Recommendation, measured: Sequence[Measurements]) -> Plot:
    """TTFT and throughput of every size at the goal's prompt length."""
    goal, chosen = recommendation.goal, recommendation.prefill
    return Plot(
        f"Prefill of {goal.isl_tokens} tokens, by tensor parallel size",
        TTFT,
        "prefill throughput (tokens/s/GPU)",
        [
            Curve(f"TP{choice.tensor_parallel_size}", [(choice.ttft_ms, choice.tokens_per_s_per_gpu)])
            for choice in prefill_choices(measured, goal)
        ],
        limit=(goal.ttft_ms, f"target TTFT {goal.ttft_ms:g} ms"),
        chosen=(chosen.ttft_ms, chosen.tokens_per_s_per_gpu),
    )


def _decode_performance(recommendation: Recommendation, measured: Sequence[Measurements]) -> Plot:
    """ITL and throughput of every size, one point for each number of requests at the same time."""
    goal, chosen = recommendation.goal, recommendation.decode
    return Plot(
        f"Decode of {goal.isl_tokens} + {goal.osl_tokens} tokens, by tensor parallel size",
        ITL,
        "decode throughput (tokens/s/GPU)",
        [
            Curve(f"TP{size}", [(choice.itl_ms, choice.tokens_per_s_per_gpu) for choice in choices])
            for size, choices in _by_size(decode_choices(measured, goal))
        ],
        limit=(goal.itl_ms, f"target ITL {goal.itl_ms:g} ms"),
        chosen=(chosen.itl_ms, chosen.tokens_per_s_per_gpu),
    )


def _cost(goal: Goal, measured: Sequence[Measurements]) -> Plot:
    """The GPU time of a request, over the tokens per second that its user sees.

    A request takes ``isl / prefill throughput + osl / decode throughput`` seconds of a GPU.
    """
    decode = _undominated(sorted(decode_choices(measured, goal), key=lambda choice: choice.itl_ms))
    curves = []
    for prefill in prefill_choices(measured, goal):
        prompt_s = goal.isl_tokens / prefill.tokens_per_s_per_gpu
        points = [
            (
                1000 / choice.itl_ms,
                (prompt_s + goal.osl_tokens / choice.tokens_per_s_per_gpu) * REQUESTS / 3600,
            )
            for choice in decode
        ]
        name = f"prefill TP{prefill.tensor_parallel_size}, TTFT {prefill.ttft_ms:.0f} ms"
        curves.append(Curve(name, points))
    return Plot(
        "Cost of a request",
        "tokens/s that one user sees (1000 / ITL)",
        f"GPU-hours for {REQUESTS} requests",
        curves,
    )


def _undominated(by_itl: Iterable[DecodeChoice]) -> list[DecodeChoice]:
    """Return the choices, given by rising ITL, that have more throughput than all before them."""
    kept: list[DecodeChoice] = []
    for choice in by_itl:
        if not kept or choice.tokens_per_s_per_gpu > kept[-1].tokens_per_s_per_gpu:
            kept.append(choice)
    return kept


def _prefill_curve(profile: MeasuredProfile, label: str, values: Sequence[float]) -> Plot:
    points = list(zip(profile.prefill_isl, values, strict=True))
    return Plot("Prefill of the chosen size", "prompt length (tokens)", label, [Curve("measured", points)])


def _decode_curves(profile: MeasuredProfile, label: str, values: Sequence[float]) -> Plot:
    points = sorted(zip(profile.y_context_length, profile.x_kv_usage, values, strict=True))
    curves = [
        Curve(f"context of {context:.0f} tokens", [(usage, value) for _, usage, value in row])
        for context, row in groupby(points, key=lambda point: point[0])
    ]
    return Plot("Decode of the chosen size", "KV cache in use (part of 1)", label, curves)


def _by_size(choices: Iterable[DecodeChoice]) -> Iterator[tuple[int, list[DecodeChoice]]]:
    """The choices of each tensor parallel size, by rising concurrency."""
    ordered = sorted(choices, key=lambda choice: (choice.tensor_parallel_size, choice.concurrency))
    for size, group in groupby(ordered, key=lambda choice: choice.tensor_parallel_size):
        yield size, list(group)
