"""The forecast of one curve, as a function of its past."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from dynaplan.core.forecasting.autoregression import autoregression
from dynaplan.core.forecasting.backtest import DISCOUNT, score
from dynaplan.core.forecasting.seasonal import seasonal
from dynaplan.core.forecasting.selection import Choice, choose
from dynaplan.core.forecasting.series import (
    Series,
    carried_on,
    from_logarithms,
    last_value,
    logarithms,
    measured,
    was_measured,
)
from dynaplan.core.forecasting.smoothing import constant, damped, kalman, level
from dynaplan.core.forecasting.trend import trend
from dynaplan.domain.settings.forecasting import (
    HISTORY_INTERVALS,
    OUTSIDE_PREDICTORS,
    Forecast,
    ForecastSettings,
)

Method = Callable[[Series, int, ForecastSettings], list[float]]
"""For every interval of the series, the forecast that would have been made then, so many steps ahead."""

METHODS: Mapping[str, Method] = {
    "constant": constant,
    "level": level,
    "damped": damped,
    "kalman": kalman,
    "autoregression": autoregression,
    "seasonal": seasonal,
}
"""The simpler first: of equals ``auto`` takes the one that comes first."""

COMPARED_INTERVALS = 240
"""How far ``auto`` looks back; errors older than that hardly count any more."""


def forecast(
    history: Sequence[float | None], steps: int, settings: ForecastSettings, *, is_count: bool = False
) -> Forecast:
    """What is expected ``steps`` intervals after the newest value of the history (the next one: 1).

    One value per interval, the newest last. None is an interval without data, which is not 0; so are NaN,
    infinite and negative values. Total: every history has a forecast, finite and not negative.
    ``is_count`` says that the values are numbers of requests: ``auto`` begins with ``trend`` then.
    The predictors that are computed outside (``arima``, ``prophet``) are the last value here.
    """
    predictor = settings.load_predictor
    window = COMPARED_INTERVALS if predictor == "auto" else HISTORY_INTERVALS
    series, steps = measured(history, window), max(1, steps)
    if not series:
        return nothing_measured(history)
    if predictor in OUTSIDE_PREDICTORS:
        return last_known(history, f"{predictor} is not computed here")
    if predictor == "auto":
        choice = choice_of_method(series, steps, settings, is_count=is_count)
        told, method, why = list(choice.forecasts), choice.methods[-1], choice.why
    else:
        told, method = run(predictor, series, steps, settings), predictor
        why = f"{method}, {_ahead(steps)}"
    points = sum(each is not None for each in series)
    if method == "kalman" and points < settings.kalman_min_points:
        why = f"the last value: kalman is warming up, {points} of {settings.kalman_min_points} measurements"
    error = score(told, series, steps, discount=DISCOUNT).mean_error
    return Forecast(told[-1], method, why, typical_error=error if math.isfinite(error) else 0.0)


def choice_of_method(
    series: Series, steps: int, settings: ForecastSettings, *, is_count: bool = False
) -> Choice:
    """Which method ``auto`` believes at each interval of the series, and the forecasts it makes with it."""
    told = {name: run(name, series, steps, settings) for name in METHODS}
    if not is_count:
        return choose(told, series, steps)
    return choose(told, series, steps, beginning=("trend", _clean(trend(series, steps), series)))


def run(name: str, series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """The forecasts of one method at every interval of the series: not negative, not NaN, not infinite."""
    if settings.load_predictor_log1p:
        return _clean(from_logarithms(METHODS[name](logarithms(series), steps, settings)), series)
    return _clean(METHODS[name](series, steps, settings), series)


def _clean(told: Sequence[float], series: Series) -> list[float]:
    stand_ins = carried_on(series)
    return [
        max(0.0, each) if math.isfinite(each) else instead
        for each, instead in zip(told, stand_ins, strict=True)
    ]


def last_known(history: Sequence[float | None], reason: str) -> Forecast:
    """The last measurement, because of ``reason``."""
    series = measured(history, HISTORY_INTERVALS)
    if not series:
        return nothing_measured(history)
    return Forecast(last_value(series), "constant", f"the last value: {reason}")


def nothing_measured(history: Sequence[float | None]) -> Forecast:
    """The forecast of a history without traffic: 0, known when that was measured."""
    if was_measured(history[-HISTORY_INTERVALS:]):
        return Forecast(0.0, "constant", "no traffic so far")
    return Forecast(0.0, "constant", "no data so far", is_known=False)


def _ahead(steps: int) -> str:
    return "one interval ahead" if steps == 1 else f"{steps} intervals ahead"
