"""Short ways to write down an interval of a planner that plans for targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.traffic import INPUT_TOKENS, OUTPUT_TOKENS, Lengths, Traffic
from dynaplan.planner.model import Expected, Observation, TrafficForecast
from dynaplan.planner.rules.sla_policy import PerformanceModel
from dynaplan.planner.sla_model import build_sla_model
from tests.unit.planner.rules.situations import interval

H200 = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
SETTINGS = PlannerSettings(
    policy="sla", profile_results_dir=H200, itl_ms=20.0, adjustment_interval_s=10.0, no_correction=True
)


def model(settings: PlannerSettings = SETTINGS) -> PerformanceModel:
    return build_sla_model(settings)


def lengths(tokens: float, bounds: Sequence[float]) -> Lengths:
    """All in the bucket of that length."""
    index = next(number for number, bound in enumerate(bounds) if tokens <= bound)
    counts = [0.0] * (len(bounds) + 1)
    counts[index] = 100.0
    return Lengths(tuple(map(float, bounds)), tuple(counts), tokens)


def traffic(
    requests_per_s: float | None, isl: float = 3000, osl: float = 150, interval_s: float = 10.0
) -> Traffic:
    if requests_per_s is None:
        return Traffic(interval_s, missing="no frontend answered")
    return Traffic(
        interval_s,
        requests_per_s * interval_s,
        isl,
        osl,
        100.0,
        10.0,
        1600.0,
        lengths(isl, INPUT_TOKENS),
        lengths(osl, OUTPUT_TOKENS),
        1.0,
    )


def foreseen(
    requests_per_s: Sequence[float], isl: float = 3000, osl: float = 150, interval_s: float = 10.0
) -> TrafficForecast:
    expected = tuple(
        Expected(rate * interval_s, isl, osl, ahead=ahead, why="told by the test")
        for ahead, rate in enumerate(requests_per_s, 1)
    )
    return TrafficForecast(interval_s, expected, lengths(isl, INPUT_TOKENS), lengths(osl, OUTPUT_TOKENS), 1.0)


def planned_interval(
    prefill: int,
    decode: int,
    requests_per_s: Sequence[float],
    *,
    kv: float = 0.2,
    queue: Sequence[float] = (0.0,),
    at_s: float = 0.0,
    startup_s: float = 0.0,
) -> Observation:
    """One interval with settled workers, in which the first of the rates was seen."""
    seen = interval(prefill, decode, kv, queue, at_s)
    return replace(
        seen,
        traffic=traffic(requests_per_s[0]),
        foresight=foreseen(requests_per_s),
        startup_s=startup_s,
    )
