"""The forecast of one curve as a function of its past, by the method that the settings name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from dynaplan.config.settings.planner import (
    HISTORY_INTERVALS,
    OUTSIDE_PREDICTORS,
    Forecast,
    ForecastSettings,
)
from dynaplan.planner.forecasting.autoregression import autoregression
from dynaplan.planner.forecasting.seasonal import seasonal
from dynaplan.planner.forecasting.selection import Choice, choose, first_choice
from dynaplan.planner.forecasting.series import (
    Series,
    clean_history,
    fill_gaps,
    from_logarithms,
    has_measurement,
    last_value,
    logarithms,
)
from dynaplan.planner.forecasting.smoothing import constant, damped, kalman, level, trend

Method = Callable[[Series, int, ForecastSettings], list[float]]
"""Returns, for every interval of the series, the forecast ``steps`` ahead that would have been made then."""

METHODS: Mapping[str, Method] = {
    "constant": constant,
    "level": level,
    "damped": damped,
    "kalman": kalman,
    "autoregression": autoregression,
    "seasonal": seasonal,
}
"""Methods by name, the simpler first: of equally good ones ``auto`` takes the first."""

COMPARED_INTERVALS = 240
"""Intervals that ``auto`` looks back; older errors hardly count any more."""


def forecast(
    history: Sequence[float | None], steps: int, settings: ForecastSettings, *, is_count: bool = False
) -> Forecast:
    """Return the forecast ``steps`` intervals after the newest value of the history (the next one: 1).

    One value per interval, the newest last. None is an interval without data, which is not 0; so are NaN,
    infinite and negative values. Total: every history has a forecast, finite and not negative.
    ``is_count``: the values are numbers of requests, with which ``auto`` begins with ``trend``. The
    predictors that are computed outside (``arima``, ``prophet``) are the last value here.
    """
    predictor = settings.load_predictor
    window = COMPARED_INTERVALS if predictor == "auto" else HISTORY_INTERVALS
    series, steps = clean_history(history, window), max(1, steps)
    if not series:
        return forecast_without_traffic(history)
    if predictor in OUTSIDE_PREDICTORS:
        return forecast_last_value(history, f"{predictor} is not computed here")
    if predictor == "auto":
        choice = choose_method(series, steps, settings, is_count=is_count)
        forecasts, method, why = list(choice.forecasts), choice.methods[-1], choice.why
    else:
        forecasts, method = run_method(predictor, series, steps, settings), predictor
        why = f"{method}, {_describe_steps(steps)}"
    points = sum(value is not None for value in series)
    if method == "kalman" and points < settings.kalman_min_points:
        why = f"the last value: kalman is warming up, {points} of {settings.kalman_min_points} measurements"
    return Forecast(
        forecasts[-1],
        method,
        why,
    )


def choose_method(
    series: Series, steps: int, settings: ForecastSettings, *, is_count: bool = False
) -> Choice:
    """Return the choice of ``auto`` at each interval of the series, with its forecasts."""
    made = {name: run_method(name, series, steps, settings) for name in METHODS}
    if not is_count:
        return choose(made, series, steps)
    early = series[: first_choice(series, steps)]  # later ones are never read, and trend is slow
    return choose(made, series, steps, beginning=("trend", _clean(trend(early, steps), early)), is_count=True)


def run_method(name: str, series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Return the forecasts of one method at every interval of the series: not negative, finite."""
    if settings.load_predictor_log1p:
        return _clean(from_logarithms(METHODS[name](logarithms(series), steps, settings)), series)
    return _clean(METHODS[name](series, steps, settings), series)


def _clean(forecasts: Sequence[float], series: Series) -> list[float]:
    """Replace forecasts that are not finite by the last measurement, and negative ones by 0."""
    stand_ins = fill_gaps(series)
    return [
        max(0.0, forecast) if math.isfinite(forecast) else instead
        for forecast, instead in zip(forecasts, stand_ins, strict=True)
    ]


def forecast_last_value(history: Sequence[float | None], reason: str) -> Forecast:
    """Return the last measurement as the forecast, because of ``reason``."""
    series = clean_history(history, HISTORY_INTERVALS)
    if not series:
        return forecast_without_traffic(history)
    return Forecast(last_value(series), "constant", f"the last value: {reason}")


def forecast_without_traffic(history: Sequence[float | None]) -> Forecast:
    """Return the forecast of a history without traffic: 0, known if that was measured."""
    if has_measurement(history[-HISTORY_INTERVALS:]):
        return Forecast(0.0, "constant", "no traffic so far")
    return Forecast(0.0, "constant", "no data so far", is_known=False)


def _describe_steps(steps: int) -> str:
    return "one interval ahead" if steps == 1 else f"{steps} intervals ahead"


class CoreForecaster:
    """See ``dynaplan.planner.ports.Forecaster``; for ``constant``, ``kalman`` and ``auto``."""

    def __init__(self, settings: ForecastSettings) -> None:
        self._settings = settings

    async def forecast(
        self, history: Sequence[float | None], steps: int, *, is_count: bool = False
    ) -> Forecast:
        """Compute the forecast: a few milliseconds at most, for the longest history."""
        return forecast(history, steps, self._settings, is_count=is_count)

    async def close(self) -> None:
        pass
