"""Pictures of a sweep, drawn with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dynaplan.core.engine.timing import MeasuredProfile
from dynaplan.core.profiling.recommendation import Recommendation
from dynaplan.core.profiling.selection import DecodeChoice, Goal, decode_choices, prefill_choices
from dynaplan.domain.measurements import Measurements

MISSING = "no plots: matplotlib is not installed (pip install 'dynaplan[plots]')"

SIZE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 120


def selected_dir(directory: Path, half: str) -> Path:
    """The directory of the chosen size's measured points and their pictures; ``half``: prefill or decode."""
    return directory / f"selected_{half}_interpolation"


def draw(directory: Path, recommendation: Recommendation, measured: Sequence[Measurements]) -> list[Path]:
    """All the pictures; returns the files. Raises OSError, and ImportError without matplotlib."""
    profile = recommendation.profile
    return [
        _prefill_performance(directory / "prefill_performance.png", recommendation, measured),
        _decode_performance(directory / "decode_performance.png", recommendation, measured),
        _cost(directory / "cost_per_request.png", recommendation.goal, measured),
        *_prefill_curves(selected_dir(directory, "prefill"), profile),
        *_decode_curves(selected_dir(directory, "decode"), profile),
    ]


def _prefill_performance(
    path: Path, recommendation: Recommendation, measured: Sequence[Measurements]
) -> Path:
    """TTFT and throughput of every size at the goal's prompt length."""
    goal = recommendation.goal
    figure, axes = _picture(
        "Prefill performance", "time to first token (ms)", "prefill throughput (tokens/s/GPU)"
    )
    for each in prefill_choices(measured, goal):
        axes.plot(each.ttft_ms, each.tokens_per_s_per_gpu, "o", label=f"TP{each.tensor_parallel_size}")
    chosen = recommendation.prefill
    _mark(axes, chosen.ttft_ms, chosen.tokens_per_s_per_gpu)
    axes.axvline(goal.ttft_ms, color="red", linestyle="--", label=f"target TTFT {goal.ttft_ms:g} ms")
    return _saved(figure, axes, path)


def _decode_performance(path: Path, recommendation: Recommendation, measured: Sequence[Measurements]) -> Path:
    """ITL and throughput of every size, over the number of requests in flight."""
    goal = recommendation.goal
    figure, axes = _picture(
        "Decode performance", "inter-token latency (ms)", "decode throughput (tokens/s/GPU)"
    )
    for size, choices in _by_size(decode_choices(measured, goal)):
        points = sorted(choices, key=lambda each: each.concurrency)
        throughputs = [each.tokens_per_s_per_gpu for each in points]
        axes.plot([each.itl_ms for each in points], throughputs, "o-", label=f"TP{size}")
    chosen = recommendation.decode
    _mark(axes, chosen.itl_ms, chosen.tokens_per_s_per_gpu)
    axes.axvline(goal.itl_ms, color="red", linestyle="--", label=f"target ITL {goal.itl_ms:g} ms")
    return _saved(figure, axes, path)


def _cost(path: Path, goal: Goal, measured: Sequence[Measurements]) -> Path:
    """What a request costs, prefill and decode together, over the speed that its user sees."""
    figure, axes = _picture(
        "Cost of a request", "tokens/s that one user sees (1000 / ITL)", "GPU-hours for 1000 requests"
    )
    decode = sorted(decode_choices(measured, goal), key=lambda each: each.itl_ms)
    for prefill in prefill_choices(measured, goal):
        prompt_s = goal.isl_tokens / prefill.tokens_per_s_per_gpu
        cheapest = _undominated(decode)
        hours = [(prompt_s + goal.osl_tokens / each.tokens_per_s_per_gpu) * 1000 / 3600 for each in cheapest]
        label = f"prefill TP{prefill.tensor_parallel_size}, TTFT {prefill.ttft_ms:.0f} ms"
        axes.plot([1000 / each.itl_ms for each in cheapest], hours, "o-", label=label)
    return _saved(figure, axes, path)


def _undominated(by_itl: Iterable[DecodeChoice]) -> list[DecodeChoice]:
    """Those with more throughput than any that has a smaller ITL."""
    kept: list[DecodeChoice] = []
    for each in by_itl:
        if not kept or each.tokens_per_s_per_gpu > kept[-1].tokens_per_s_per_gpu:
            kept.append(each)
    return kept


def _prefill_curves(directory: Path, profile: MeasuredProfile) -> list[Path]:
    pictures = []
    for name, label, values in (
        ("prefill_ttft_interpolation", "time to first token (ms)", profile.prefill_ttft),
        ("prefill_throughput_interpolation", "throughput (tokens/s/GPU)", profile.prefill_thpt_per_gpu),
    ):
        figure, axes = _picture("Prefill of the chosen size", "prompt length (tokens)", label)
        axes.plot(profile.prefill_isl, values, "o-", label="measured")
        pictures.append(_saved(figure, axes, directory / f"{name}.png"))
    return pictures


def _decode_curves(directory: Path, profile: MeasuredProfile) -> list[Path]:
    pictures = []
    for name, label, values in (
        ("decode_itl_interpolation", "inter-token latency (ms)", profile.z_itl),
        ("decode_throughput_interpolation", "throughput (tokens/s/GPU)", profile.z_thpt_per_gpu),
    ):
        figure, axes = _picture("Decode of the chosen size", "KV cache in use", label)
        points = sorted(zip(profile.y_context_length, profile.x_kv_usage, values, strict=True))
        for context, row in groupby(points, key=lambda point: point[0]):
            _, usages, heights = zip(*row, strict=True)
            axes.plot(usages, heights, "o-", label=f"context of {context:.0f} tokens")
        pictures.append(_saved(figure, axes, directory / f"{name}.png"))
    return pictures


def _by_size(choices: Iterable[DecodeChoice]) -> Iterable[tuple[int, Iterable[DecodeChoice]]]:
    ordered = sorted(choices, key=lambda each: each.tensor_parallel_size)
    return groupby(ordered, key=lambda each: each.tensor_parallel_size)


def _picture(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    """A figure that no window shows, and its axes."""
    from matplotlib.figure import Figure  # an extra, half a second: only for pictures

    figure = Figure(figsize=SIZE_INCHES)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _mark(axes: Any, x: float, y: float) -> None:
    """A ring around what was chosen."""
    axes.plot(x, y, "o", markersize=14, fillstyle="none", color="black", label="chosen")


def _saved(figure: Any, axes: Any, path: Path) -> Path:
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path
