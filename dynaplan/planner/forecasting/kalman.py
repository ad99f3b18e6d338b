"""The Kalman filter of a local linear trend: the forecast for a load that may rise or fall.

Harvey, Forecasting, Structural Time Series Models and the Kalman Filter, 1989; matrices and defaults as in
Dynamo's predictor. The state is (level, trend) with

    F = [[1, 1], [0, 1]]   H = [1, 0]   Q = diag(q-level, q-trend)   R = r   P(0) = 1000 I

and the forecast is level + steps x trend. In an interval without data only the prediction step is done. After
a sudden jump of the load it overshoots for some intervals: it takes the jump for a trend.
"""

from __future__ import annotations

from dynaplan.config.settings.planner import ForecastSettings
from dynaplan.planner.forecasting.series import Series

INITIAL_VARIANCE = 1000.0
"""Variance of level and trend before the first measurement, as in Dynamo."""


def kalman(series: Series, steps: int, settings: ForecastSettings) -> float:
    """Return the forecast ``steps`` intervals ahead: the module's filter, its 2x2 matrices written as
    scalars.

    The first measurement is the initial level.
    """
    q_level, q_trend, r = settings.kalman_q_level, settings.kalman_q_trend, settings.kalman_r
    level, trend = series[0] or 0.0, 0.0
    p00 = p11 = INITIAL_VARIANCE
    p01 = 0.0
    for value in series[1:]:
        level += trend
        p00 += 2 * p01 + p11 + q_level
        p01 += p11
        p11 += q_trend
        if value is not None:
            gain_level, gain_trend = p00 / (p00 + r), p01 / (p00 + r)
            innovation = value - level
            level += gain_level * innovation
            trend += gain_trend * innovation
            p11 -= gain_trend * p01
            p00 *= 1 - gain_level
            p01 *= 1 - gain_level
    return level + steps * trend
