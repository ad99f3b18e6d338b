"""Methods that follow level and trend: the last value, a moving level, and a Kalman filter.

A method tells, for every interval of a series, what it would have forecast at that time ``steps``
intervals ahead, knowing only what came before. The last of these is the forecast of today; the others are
its back-test.
"""

from __future__ import annotations

from dynaplan.core.forecasting.series import Series, carried_on
from dynaplan.domain.settings.forecasting import ForecastSettings

LEVEL_GAIN = 0.3
TREND_DAMPING = 0.9
INITIAL_VARIANCE = 1000.0
"""How little is known before the first measurement. The original's."""


def constant(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """The last measurement."""
    return carried_on(series)


def level(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Exponential smoothing: for load that varies about a level. The mean, until that is the slower one."""
    forecasts, current, seen = [], 0.0, 0
    for each in series:
        if each is not None:
            seen += 1
            current += max(LEVEL_GAIN, 1 / seen) * (each - current)
        forecasts.append(current)
    return forecasts


def kalman(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """A local linear trend by a Kalman filter, with the original's matrices; its trend goes on for ever."""
    return _local_trend(series, float(steps), 1.0, settings)


def damped(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """The same filter with a trend that fades by a tenth each interval: no rise goes on for ever."""
    reach = sum(TREND_DAMPING**step for step in range(1, steps + 1))
    return _local_trend(series, reach, TREND_DAMPING, settings)


def _local_trend(series: Series, reach: float, damping: float, settings: ForecastSettings) -> list[float]:
    """Level and trend at each interval, ``level + reach * trend`` after it.

    The state is (level, trend), F = [[1, d], [0, d]], H = [1, 0], Q = diag(q-level, q-trend), R = r. The
    first measurement is the level; an interval without one only predicts. Written out for two dimensions.
    """
    q_level, q_trend, r = settings.kalman_q_level, settings.kalman_q_trend, settings.kalman_r
    now = trend = 0.0
    p00 = p11 = INITIAL_VARIANCE
    p01 = 0.0
    forecasts, seen, newest = [], 0, 0.0
    for each in series:
        if seen == 0:
            now = each or 0.0
        else:
            trend *= damping
            now += trend
            p11 *= damping * damping
            cross = damping * p01
            p00 += 2 * cross + p11 + q_level
            p01 = cross + p11
            p11 += q_trend
            if each is not None:
                gain_level, gain_trend = p00 / (p00 + r), p01 / (p00 + r)
                surprise = each - now
                now += gain_level * surprise
                trend += gain_trend * surprise
                p11 -= gain_trend * p01
                p00 *= 1 - gain_level
                p01 *= 1 - gain_level
        if each is not None:
            seen, newest = seen + 1, each
        forecasts.append(newest if seen < settings.kalman_min_points else now + reach * trend)
    return forecasts
