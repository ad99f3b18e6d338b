"""The forecast of one curve as a function of its past, by the method that the settings name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynaplan.config.settings.planner import (
    HISTORY_INTERVALS,
    OUTSIDE_PREDICTORS,
    Forecast,
    ForecastSettings,
)
from dynaplan.planner.forecasting.kalman import kalman
from dynaplan.planner.forecasting.series import (
    clean_history,
    from_logarithm,
    has_measurement,
    last_value,
    logarithms,
)


def forecast(history: Sequence[float | None], steps: int, settings: ForecastSettings) -> Forecast:
    """Return the forecast ``steps`` intervals after the newest value of the history (the next one: 1).

    One value per interval, the newest last. None is an interval without data, which is not 0; so are NaN,
    infinite and negative values. Total: every history has a forecast, finite and not negative. The predictors
    that are computed outside (``arima``, ``prophet``) are the last value here.
    """
    predictor = settings.load_predictor
    series, steps = clean_history(history, HISTORY_INTERVALS), max(1, steps)
    if not series:
        return forecast_without_traffic(history)
    if predictor in OUTSIDE_PREDICTORS:
        return forecast_last_value(history, f"{predictor} is not computed here")
    if predictor == "constant":
        return Forecast(last_value(series), "constant", "the last value")
    points, least = sum(value is not None for value in series), settings.kalman_min_points
    if points < least:
        return forecast_last_value(history, f"kalman is warming up, {points} of {least} measurements")
    if settings.load_predictor_log1p:
        value = from_logarithm(kalman(logarithms(series), steps, settings))
    else:
        value = kalman(series, steps, settings)
    if not math.isfinite(value):
        return forecast_last_value(history, f"kalman says {value}")
    return Forecast(max(0.0, value), "kalman", f"kalman, {_describe_steps(steps)}")


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
    """See ``dynaplan.planner.ports.Forecaster``; for ``constant`` and ``kalman``."""

    def __init__(self, settings: ForecastSettings) -> None:
        self._settings = settings

    async def forecast(self, history: Sequence[float | None], steps: int) -> Forecast:
        """Compute the forecast: half a millisecond, for the longest history."""
        return forecast(history, steps, self._settings)

    async def forecast_all(self, requests: Sequence[tuple[Sequence[float | None], int]]) -> list[Forecast]:
        return [forecast(history, steps, self._settings) for history, steps in requests]

    async def close(self) -> None:
        pass
