"""A straight line through the newest intervals, carried on with a fading slope: the start of ``auto``.

The other methods learn what the load is like; this one needs three intervals.

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

from dynaplan.planner.forecasting.autoregression import CAP
from dynaplan.planner.forecasting.series import Series, carried_on
from dynaplan.planner.forecasting.smoothing import TREND_DAMPING

SHORTEST = 2
"""Fewest intervals that a line goes through."""


LONGEST = 12
"""Most intervals that a line goes through."""

STRAIGHT = 2.0
"""Factor on the squared residuals that chance explains, up to which a line counts as straight."""

CLEARLY = 2.0
"""Standard deviations of chance that a slope must exceed to count."""


MORE_CLEARLY = 3.0
"""The same for a slope that two intervals make."""

DIFFERENCES = 10
"""Second differences that the noise is told from."""

QUARTILE_TO_DEVIATION = 1 / 0.3186
"""Standard deviation of a normal variable over the lower quartile of its absolute values."""


def trend(series: Series, steps: int) -> list[float]:
    """Forecast by the line of the module; the last value while there are fewer than three."""
    values = carried_on(series)
    reach = sum(TREND_DAMPING**step for step in range(1, steps + 1))
    return [_ahead(values[max(0, now + 1 - LONGEST) : now + 1], reach) for now in range(len(values))]


def _ahead(recent: list[float], reach: float) -> float:
    """Return the capped forecast from the recent intervals."""
    if len(recent) <= SHORTEST:
        return recent[-1]
    return min(max(_carried_on(recent, reach), min(recent) / CAP), CAP * max(recent))


def _carried_on(recent: list[float], reach: float) -> float:
    """Return the end of the line, carried on by its shrunken slope."""
    variance = _variance(recent)
    width, mean, slope = _line(recent, variance)
    square = slope * slope
    if not square:
        return mean
    by_chance = 12 * variance / (width * (width * width - 1))
    clearly = MORE_CLEARLY if width == SHORTEST else CLEARLY
    slope *= max(0.0, 1 - clearly**2 * by_chance / square)
    return mean + slope * ((width - 1) / 2 + reach)


def _variance(recent: list[float]) -> float:
    """Return the variance of one interval about its line: the noise of the module."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(recent, recent[1:], recent[2:], strict=False)]
    small = sorted(bends[-DIFFERENCES:])[(len(bends[-DIFFERENCES:]) - 1) // 4] if len(bends) > 2 else 0.0
    deviation = QUARTILE_TO_DEVIATION * small / math.sqrt(6)
    return max(deviation * deviation, sum(recent) / len(recent), 1.0)


def _line(recent: list[float], variance: float) -> tuple[int, float, float]:
    """Return the widest straight line: the number of its intervals, their mean, and its slope."""
    best = (SHORTEST, sum(recent[-2:]) / 2, recent[-1] - recent[-2])
    for width in range(SHORTEST + 1, len(recent) + 1):
        values, middle = recent[-width:], (width - 1) / 2
        mean = sum(values) / width
        squares = width * (width * width - 1) / 12
        slope = sum((place - middle) * value for place, value in enumerate(values)) / squares
        off = [value - mean - slope * (place - middle) for place, value in enumerate(values)]
        residuals, freedom = sum(residual * residual for residual in off), width - 2
        if residuals > STRAIGHT * variance * (freedom + 2 * math.sqrt(2 * freedom)):
            break
        best = (width, mean, slope)
    return best
