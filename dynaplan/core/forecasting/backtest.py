"""How good forecasts were: each is held against what came, and too low costs more than too high."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.core.forecasting.series import Series

UNDER_WEIGHT = 3.0
"""What a forecast that is too low costs, by the same amount that one which is too high costs 1.

Too high wastes a share of a GPU for one interval. Too low makes every request of that interval wait, and
those after it, until the queue has been worked off with the same capacity that did not do.
"""

DISCOUNT = 0.97
"""The weight of an interval's error after the next one: half after 23 intervals."""


def loss(forecast: float, actual: float) -> float:
    """The cost of one forecast, in the unit of the curve."""
    error = actual - forecast
    return UNDER_WEIGHT * error if error > 0 else -error


@dataclass(frozen=True)
class Score:
    """Means over ``count`` forecasts: absolute error and loss in the curve's unit, and what came."""

    count: int
    mean_error: float
    mean_loss: float
    mean_actual: float


def score(forecasts: Sequence[float], series: Series, steps: int, *, discount: float = 1.0) -> Score:
    """Hold every forecast against the interval ``steps`` later; the newer ones weigh more by ``discount``."""
    count, weight = 0, 0.0
    error = cost = actual = 0.0
    for told, came in zip(forecasts, series[steps:], strict=False):
        if came is not None:
            count += 1
            weight = discount * weight + 1
            error = discount * error + abs(came - told)
            cost = discount * cost + loss(told, came)
            actual = discount * actual + came
    if not count:
        return Score(0, 0.0, 0.0, 0.0)
    return Score(count, error / weight, cost / weight, actual / weight)
