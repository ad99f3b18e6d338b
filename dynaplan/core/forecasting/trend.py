"""A straight line through as much of the recent past as one goes through, carried on with a fading slope.

The other methods learn what the load is like; this one needs three intervals. Numbers of requests vary at
least by their square root (Poisson): a change that could be such chance is not taken for a slope.
"""

from __future__ import annotations

import math

from dynaplan.core.forecasting.autoregression import CAP
from dynaplan.core.forecasting.series import Series, carried_on
from dynaplan.core.forecasting.smoothing import TREND_DAMPING

SHORTEST, LONGEST = 2, 12
"""Intervals that a line is laid through."""

STRAIGHT = 2.0
"""So many times what chance makes of it the squares of the residuals may be, and their own deviation more."""

CLEARLY, MORE_CLEARLY = 2.0, 3.0
"""So many standard deviations of chance a slope must have, to be one; more where two intervals make it."""

DIFFERENCES = 10
"""Second differences that the noise is told from, by their lower quartile: a jump makes large ones."""

QUARTILE_TO_DEVIATION = 1 / 0.3186
"""Of what is spread normally: the standard deviation over the lower quartile of the absolute values."""


def trend(series: Series, steps: int) -> list[float]:
    """See the module. The last value while there are fewer than three."""
    values = carried_on(series)
    reach = sum(TREND_DAMPING**step for step in range(1, steps + 1))
    return [_ahead(values[max(0, now + 1 - LONGEST) : now + 1], reach) for now in range(len(values))]


def _ahead(recent: list[float], reach: float) -> float:
    if len(recent) <= SHORTEST:
        return recent[-1]
    return min(max(_carried_on(recent, reach), min(recent) / CAP), CAP * max(recent))


def _carried_on(recent: list[float], reach: float) -> float:
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
    """Of one interval about its line: at least that of a number of requests. Two bends may be one jump."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(recent, recent[1:], recent[2:], strict=False)]
    small = sorted(bends[-DIFFERENCES:])[(len(bends[-DIFFERENCES:]) - 1) // 4] if len(bends) > 2 else 0.0
    deviation = QUARTILE_TO_DEVIATION * small / math.sqrt(6)
    return max(deviation * deviation, sum(recent) / len(recent), 1.0)


def _line(recent: list[float], variance: float) -> tuple[int, float, float]:
    """The widest line that goes through the newest values: over how many, their mean, and its slope."""
    best = (SHORTEST, sum(recent[-2:]) / 2, recent[-1] - recent[-2])
    for width in range(SHORTEST + 1, len(recent) + 1):
        values, middle = recent[-width:], (width - 1) / 2
        mean = sum(values) / width
        squares = width * (width * width - 1) / 12
        slope = sum((place - middle) * each for place, each in enumerate(values)) / squares
        off = [each - mean - slope * (place - middle) for place, each in enumerate(values)]
        residuals, freedom = sum(each * each for each in off), width - 2
        if residuals > STRAIGHT * variance * (freedom + 2 * math.sqrt(2 * freedom)):
            break
        best = (width, mean, slope)
    return best
