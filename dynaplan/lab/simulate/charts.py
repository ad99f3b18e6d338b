"""The charts of simulations: their results as panels over one time axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from dynaplan.lab.drawing.panels import Lane, Panel, Series, TimeAxis
from dynaplan.simulation.outcome import Slo, Spread, Window
from dynaplan.simulation.run import Result
from dynaplan.simulation.timeline import ScaleEvent

PERCENT = 95
"""The percentile of the latencies in a window that is drawn."""

Lines = list[Series]
"""The lines of one panel."""

Measure = Callable[[Window, float], float | None]
"""A value of a window, from the window and its length in seconds."""


def axis_of(results: Sequence[Result]) -> TimeAxis:
    """Return the time axis: until the last arrival, as GPU-hours are counted."""
    return TimeAxis(max([1.0, *(each.trace_s for each in results)]))


def panels_of(results: Sequence[Result], slo: Slo, gpus: int, *, is_disaggregated: bool) -> list[Panel]:
    """Return the panels: load, workers, GPUs, latencies and queues; latencies by the requests' arrival."""
    load, p95, workers = results[:1], f"p{PERCENT}, ms (dotted: target)", "workers (dashed: wanted)"
    tokens = {"prompts": _prompts, "answers": _answers}
    queue, service = _moments(results, "prefill_queue"), _moments(results, "in_service")
    return [
        Panel("requests", "Load: requests per second", _load(load, {"requests": _requests})),
        Panel("tokens", "Load: tokens per second, prompts and answers (dashed)", _load(load, tokens)),
        *([_workers("prefill", f"Prefill {workers}", results)] if is_disaggregated else []),
        _workers("decode", f"Decode {workers}" if is_disaggregated else workers.capitalize(), results),
        Panel("gpus", "GPUs held (dotted: budget)", _gpus(results), float(gpus), is_counted=True),
        _latency("ttft_ms", f"TTFT {p95}", results, slo.ttft_ms),
        _latency("itl_ms", f"ITL {p95}", results, slo.itl_ms),
        Panel("slo", "SLO met, %", _per_window(results, "", _met)),
        *([Panel("queue", "Prefill queue", queue, is_adaptive=True)] if is_disaggregated else []),
        Panel("service", "Requests in service", service, is_adaptive=True),
    ]


def lanes_of(results: Sequence[Result], axis: TimeAxis) -> list[Lane]:
    """Return the decisions of every policy, in words."""
    return [
        Lane(
            [each.at_s for each in result.events],
            [f"{result.policy}, {axis.text(each.at_s)}: {change_text(each)}" for each in result.events],
        )
        for result in results
    ]


def change_text(event: ScaleEvent) -> str:
    """Return a change and its reason in words."""
    changes = [
        f"{name} {before} → {after}"
        for name, before, after in (
            ("prefill", event.before.prefill, event.after.prefill),
            ("decode", event.before.decode, event.after.decode),
        )
        if before != after
    ]
    return ", ".join(changes) + (f": {event.why}" if event.why else "")


def _load(results: Sequence[Result], measures: Mapping[str, Measure]) -> Lines:
    """Return the lines of the load, which is the same for every policy."""
    lines = [each for name, measure in measures.items() for each in _per_window(results, name, measure)]
    return [
        Series(each.name, each.at_s, each.values, is_dashed=bool(index)) for index, each in enumerate(lines)
    ]


def _requests(window: Window, width_s: float) -> float:
    return window.requests / width_s


def _prompts(window: Window, width_s: float) -> float:
    return window.prompt_tokens / width_s


def _answers(window: Window, width_s: float) -> float:
    return window.output_tokens / width_s


def _met(window: Window, _width_s: float) -> float | None:
    return 100 * window.both_met / window.requests if window.requests else None


def _latency(field: str, title: str, results: Sequence[Result], target_ms: float) -> Panel:
    def value(window: Window, _width_s: float) -> float | None:
        spread: Spread = getattr(window, field)
        return spread.percentile(PERCENT) if spread.count else None

    return Panel(field, title, _per_window(results, "", value), target_ms, is_adaptive=True)


def _per_window(results: Sequence[Result], name: str, measure: Measure) -> Lines:
    lines = []
    for policy, result in enumerate(results):
        windows = result.outcome.windows
        values = [measure(window, windows.width_s) for window in windows]
        lines.append(Series(name, [index * windows.width_s for index in range(len(values))], values, policy))
    return lines


def _workers(role: str, title: str, results: Sequence[Result]) -> Panel:
    def lines() -> Iterator[Series]:
        for policy, result in enumerate(results):
            at_s = [each.at_s for each in result.fleet]
            serving = [float(getattr(each.serving, role)) for each in result.fleet]
            wanted = [float(getattr(each.wanted, role)) for each in result.fleet]
            yield Series("serving", at_s, serving, policy)
            yield Series("wanted", at_s, wanted, policy, is_dashed=True)

    return Panel(role, title, list(lines()), is_counted=True)


def _gpus(results: Sequence[Result]) -> Lines:
    return [
        Series("", [each.at_s for each in result.fleet], [each.gpus for each in result.fleet], policy)
        for policy, result in enumerate(results)
    ]


def _moments(results: Sequence[Result], field: str) -> Lines:
    """Return means over the windows of the policy's looks; in a window without a look the last value
    holds."""
    lines = []
    for policy, result in enumerate(results):
        width_s = result.outcome.windows.width_s
        seen: dict[float, list[float]] = {}
        for each in result.moments:
            seen.setdefault(each.at_s // width_s * width_s, []).append(float(getattr(each, field)))
        lines.append(Series("", list(seen), [fmean(values) for values in seen.values()], policy))
    return lines
