"""Methods that follow level and trend: the last value, a moving level, and a Kalman filter.

A method returns, for every interval of a series, the forecast that it would have made at that time,
``steps`` intervals ahead, knowing only the intervals until then. The last one is today's forecast; the
others are its back-test. z is the measurement of an interval.

``constant``: z. ``level``, exponential smoothing (Brown 1956; Holt 1957): l <- l + g (z - l) with g = 0.3,
or 1/n for the n-th measurement while that is more: the mean, until it is the slower one.

``kalman``, a local linear trend (Harvey, Forecasting, Structural Time Series Models and the Kalman Filter,
1989; matrices and defaults as in Dynamo's predictor): the state is (level, trend) with

    F = [[1, d], [0, d]]   H = [1, 0]   Q = diag(q-level, q-trend)   R = r   P(0) = 1000 I

and d = 1. The forecast is level + steps x trend. ``damped`` is the same with d = 0.9, a damped trend
(Gardner and McKenzie 1985), so the trend reaches d + d^2 + ... + d^steps.

An interval without data only predicts. Both are poor after a step: a trend takes it for a slope.
"""

from __future__ import annotations

from dynaplan.config.settings.planner import ForecastSettings
from dynaplan.planner.forecasting.series import Series, carried_on

LEVEL_GAIN = 0.3
"""Smallest weight of the newest measurement in ``level``: half of it is forgotten after two intervals."""

TREND_DAMPING = 0.9
"""Factor on the trend per interval in ``damped``: no rise goes on for ever."""

INITIAL_VARIANCE = 1000.0
"""Variance of level and trend before the first measurement. The original's."""


def constant(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Forecast that every coming interval is like the last one that was measured."""
    return carried_on(series)


def level(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Forecast the exponentially smoothed level: for load that varies about a level."""
    forecasts, current, seen = [], 0.0, 0
    for value in series:
        if value is not None:
            seen += 1
            current += max(LEVEL_GAIN, 1 / seen) * (value - current)
        forecasts.append(current)
    return forecasts


def kalman(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Forecast a local linear trend, whose slope goes on for ever."""
    return _local_trend(series, float(steps), 1.0, settings)


def damped(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Forecast a local linear trend, whose slope fades by a tenth each interval."""
    reach = sum(TREND_DAMPING**step for step in range(1, steps + 1))
    return _local_trend(series, reach, TREND_DAMPING, settings)


def _local_trend(series: Series, reach: float, damping: float, settings: ForecastSettings) -> list[float]:
    """Return level + reach x trend after each interval: the module's filter, written out for two dimensions.

    The first measurement is the level. Until ``kalman-min-points`` measurements the forecast is the last
    one.
    """
    q_level, q_trend, r = settings.kalman_q_level, settings.kalman_q_trend, settings.kalman_r
    now = trend = 0.0
    p00 = p11 = INITIAL_VARIANCE
    p01 = 0.0
    forecasts, seen, newest = [], 0, 0.0
    for value in series:
        if seen == 0:
            now = value or 0.0
        else:
            trend *= damping
            now += trend
            p11 *= damping * damping
            cross = damping * p01
            p00 += 2 * cross + p11 + q_level
            p01 = cross + p11
            p11 += q_trend
            if value is not None:
                gain_level, gain_trend = p00 / (p00 + r), p01 / (p00 + r)
                surprise = value - now
                now += gain_level * surprise
                trend += gain_trend * surprise
                p11 -= gain_trend * p01
                p00 *= 1 - gain_level
                p01 *= 1 - gain_level
        if value is not None:
            seen, newest = seen + 1, value
        forecasts.append(newest if seen < settings.kalman_min_points else now + reach * trend)
    return forecasts
