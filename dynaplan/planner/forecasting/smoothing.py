"""Methods that follow level and trend: last value, moving level, Kalman filter, and a line for the start.

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

``trend`` is a straight line through the newest intervals, carried on with a fading slope. ``auto`` starts
with it: the other methods learn what the load is like, this one needs three intervals.

**Noise.** Numbers of requests vary at least by their square root (Poisson), so the variance s^2 of an
interval is at least the mean, and at least 1. If the series is noisier, its second differences a - 2b + c
show it: their standard deviation is sqrt(6) s, taken from their lower quartile, which a jump (two large
ones) does not move.

**Line.** The widest line, through 2 to 12 intervals, whose squared residuals agree with s^2: a chi-squared
variable with n - 2 degrees of freedom has mean n - 2 and deviation sqrt(2 (n - 2)), and up to 2 s^2 (n - 2
+ 2 sqrt(2 (n - 2))) is accepted.

**Slope.** Of n intervals its variance by chance is 12 s^2 / (n (n^2 - 1)) (least squares). A slope b is
shrunk by max(0, 1 - c^2 var / b^2), c = 2 (3 where two intervals make it): a change that chance could have
made counts as none. The forecast is the line's end plus b (d + d^2 + ... + d^steps), d = 0.9, capped.
"""

from __future__ import annotations

import math

from dynaplan.config.settings.planner import ForecastSettings
from dynaplan.planner.forecasting.autoregression import CAP
from dynaplan.planner.forecasting.series import Series, fill_gaps

LEVEL_GAIN = 0.3
"""Smallest weight of the newest measurement in ``level``: half of it is forgotten after two intervals."""

TREND_DAMPING = 0.9
"""Factor on the trend per interval in ``damped``: no rise goes on for ever."""

INITIAL_VARIANCE = 1000.0
"""Variance of level and trend before the first measurement. The original's."""


def constant(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Forecast that every coming interval is like the last one that was measured."""
    return fill_gaps(series)


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


MIN_LINE_INTERVALS = 2
"""Fewest intervals that a line goes through."""


MAX_LINE_INTERVALS = 12
"""Most intervals that a line goes through."""

MAX_RESIDUAL_RATIO = 2.0
"""Factor on the squared residuals that chance explains, up to which a line counts as straight."""

SIGNIFICANT_DEVIATIONS = 2.0
"""Standard deviations of chance that a slope must exceed to count."""


SIGNIFICANT_DEVIATIONS_OF_TWO = 3.0
"""The same for a slope that two intervals make."""

NOISE_DIFFERENCES = 10
"""Second differences that the noise is estimated from."""

QUARTILE_TO_DEVIATION = 1 / 0.3186
"""Standard deviation of a normal variable over the lower quartile of its absolute values."""


def trend(series: Series, steps: int) -> list[float]:
    """Forecast by the line of the module; the last value while there are fewer than three."""
    values = fill_gaps(series)
    reach = sum(TREND_DAMPING**step for step in range(1, steps + 1))
    return [
        _forecast_line(values[max(0, now + 1 - MAX_LINE_INTERVALS) : now + 1], reach)
        for now in range(len(values))
    ]


def _forecast_line(recent: list[float], reach: float) -> float:
    """Return the capped forecast from the recent intervals."""
    if len(recent) <= MIN_LINE_INTERVALS:
        return recent[-1]
    return min(max(_extrapolate(recent, reach), min(recent) / CAP), CAP * max(recent))


def _extrapolate(recent: list[float], reach: float) -> float:
    """Return the end of the line, carried on by its shrunken slope."""
    variance = _variance(recent)
    width, mean, slope = _line(recent, variance)
    square = slope * slope
    if not square:
        return mean
    by_chance = 12 * variance / (width * (width * width - 1))
    clearly = SIGNIFICANT_DEVIATIONS_OF_TWO if width == MIN_LINE_INTERVALS else SIGNIFICANT_DEVIATIONS
    slope *= max(0.0, 1 - clearly**2 * by_chance / square)
    return mean + slope * ((width - 1) / 2 + reach)


def _variance(recent: list[float]) -> float:
    """Return the variance of one interval about its line: the noise of the module."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(recent, recent[1:], recent[2:], strict=False)]
    small = (
        sorted(bends[-NOISE_DIFFERENCES:])[(len(bends[-NOISE_DIFFERENCES:]) - 1) // 4]
        if len(bends) > 2
        else 0.0
    )
    deviation = QUARTILE_TO_DEVIATION * small / math.sqrt(6)
    return max(deviation * deviation, sum(recent) / len(recent), 1.0)


def _line(recent: list[float], variance: float) -> tuple[int, float, float]:
    """Return the line through as many of the last intervals as lie on one, but for noise of that variance.

    The number of these intervals, their mean, and the slope.
    """
    best = (MIN_LINE_INTERVALS, sum(recent[-2:]) / 2, recent[-1] - recent[-2])
    for width in range(MIN_LINE_INTERVALS + 1, len(recent) + 1):
        values, middle = recent[-width:], (width - 1) / 2
        mean = sum(values) / width
        squares = width * (width * width - 1) / 12
        slope = sum((place - middle) * value for place, value in enumerate(values)) / squares
        off = [value - mean - slope * (place - middle) for place, value in enumerate(values)]
        residuals, freedom = sum(residual * residual for residual in off), width - 2
        if residuals > MAX_RESIDUAL_RATIO * variance * (freedom + 2 * math.sqrt(2 * freedom)):
            break
        best = (width, mean, slope)
    return best
