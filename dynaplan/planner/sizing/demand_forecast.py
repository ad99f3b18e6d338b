"""The forecasts that a decision needs, and the demand that they make with the measured lengths.

Requests are forecast 1 interval ahead, for when workers of this decision would be needed until
(``look_ahead.py``: ``until_s``), and half way between. Mean lengths change slowly: once, for the far end.

**Lengths are drawn towards the recent mean.** The mean of few requests is mostly chance. With the forecast
mean v, the recent mean M (half-life 5 minutes), the variance s^2 of the lengths and R forecast requests,
the standard error is s / sqrt(R), and the mean that is used is

    M + sign(v - M) max(0, |v - M| - s / sqrt(R))

soft thresholding: a difference within one standard error counts as none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dynaplan.config.settings.planner import Forecast, PlannerSettings
from dynaplan.contract.traffic import Lengths
from dynaplan.planner.forecasting.traffic_history import TrafficHistory
from dynaplan.planner.model import Demand, Expected, TrafficForecast
from dynaplan.planner.sizing.look_ahead import lookahead
from dynaplan.planner.sizing.queueing.workload import points_of


class ForecastQuery(NamedTuple):
    """One forecast that is needed: the curve of the history, and the number of intervals ahead."""

    curve: str
    ahead: int

    @property
    def is_count(self) -> bool:
        """True for the curve of numbers of requests."""
        return self.curve == REQUESTS


REQUESTS = "requests"
"""Name of the curve of numbers of requests."""


def forecast_queries(startup_s: float, interval_s: float) -> list[ForecastQuery]:
    """Return the forecasts that a decision needs, with workers that take ``startup_s`` to start."""
    last = lookahead(startup_s, interval_s).intervals
    steps = sorted({1, -(-last // 2), last})
    lengths = [ForecastQuery(curve, last) for curve in ("isl_tokens", "osl_tokens")]
    return [*(ForecastQuery(REQUESTS, ahead) for ahead in steps), *lengths]


class ForecastMethod(Protocol):
    """Forecasts curves."""

    async def __call__(self, requests: Sequence[tuple[Sequence[float | None], int]]) -> Sequence[Forecast]:
        """Forecast each of these histories as many intervals ahead as stands beside it."""
        ...


async def forecast_traffic(
    history: TrafficHistory, method: ForecastMethod, startup_s: float, settings: PlannerSettings
) -> TrafficForecast:
    """Return the forecast traffic until a worker that is started now is ready, and one interval more."""
    queries = forecast_queries(startup_s, settings.adjustment_interval_s)
    answers = await method([(history.curve(each.curve), each.ahead) for each in queries])
    return build_foresight(history, dict(zip(queries, answers, strict=True)), settings)


def build_foresight(
    history: TrafficHistory, answers: Mapping[ForecastQuery, Forecast], settings: PlannerSettings
) -> TrafficForecast:
    """Combine the answers to ``forecast_queries`` with the lengths of the requests that were seen."""
    lengths = {asked.curve: answer for asked, answer in answers.items() if not asked.is_count}
    requests = _value(answers[ForecastQuery(REQUESTS, 1)])
    isl = _mean_tokens(lengths["isl_tokens"], history.isl, requests)
    osl = _mean_tokens(lengths["osl_tokens"], history.osl, requests)
    expected = tuple(
        Expected(
            _value(answer),
            isl,
            osl,
            ahead=asked.ahead,
            why=answer.why,
        )
        for asked, answer in answers.items()
        if asked.is_count
    )
    return TrafficForecast(
        history.interval_s,
        expected,
        history.isl,
        history.osl,
        history.dispersion,
        history.prefix_hit_rate,
        history.dispersions,
    )


def demand_of(settings: PlannerSettings, foresight: TrafficForecast, expected: Expected) -> Demand:
    """Return one forecast interval as a demand: recent lengths, scaled to the forecast means.

    Its burstiness is the recent mean of the measured one, at least 1, and 1 where none was measured. Of its
    prompts the part is left to compute that was of the recent ones: all of it where no hits were measured.
    """
    assert expected.requests is not None
    return Demand(
        expected.requests / foresight.interval_s,
        _with_mean(foresight.isl, expected.isl_tokens, settings.isl_tokens),
        _with_mean(foresight.osl, expected.osl_tokens, settings.osl_tokens),
        foresight.prefix_hit_rate or 0.0,
        max(1.0, foresight.dispersion or 1.0),
        foresight.dispersions,
    )


def _with_mean(lengths: Lengths | None, mean_tokens: float | None, unseen_tokens: float) -> Lengths:
    """Return the lengths scaled so that their mean is ``mean_tokens``, by a factor of 0.5 to 2 at most.

    Without a mean they are as they were seen. Where none were seen, every length is the mean, or else
    ``unseen_tokens``.
    """
    if lengths is None or not lengths.total or not lengths.mean_tokens:
        return Lengths.fixed(mean_tokens or unseen_tokens)
    if not mean_tokens:
        return lengths
    factor = min(max(mean_tokens / lengths.mean_tokens, 0.5), 2.0)
    bounds = tuple(factor * bound for bound in lengths.upper_bounds_tokens)
    return Lengths(bounds, lengths.counts, factor * lengths.mean_tokens)


def _mean_tokens(forecast: Forecast, seen: Lengths | None, requests: float | None) -> float | None:
    """Return the forecast mean length, drawn towards the recent mean by its standard error."""
    value = _value(forecast)
    if value is None or seen is None or not seen.mean_tokens:
        return value
    points = points_of(seen, math.inf)
    variance = max(0.0, points.moment(2) - points.moment(1) ** 2)
    apart = value - seen.mean_tokens
    by_chance = math.sqrt(variance / max(1.0, requests or 0.0))
    return seen.mean_tokens + math.copysign(max(0.0, abs(apart) - by_chance), apart)


def _value(forecast: Forecast) -> float | None:
    """Return the forecast value, None where nothing was ever measured."""
    return forecast.value if forecast.is_known else None
