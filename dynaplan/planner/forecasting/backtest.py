"""The back-test: forecasts held against the load that came; too low costs more than too high.

The cost of a forecast is 3 (actual - forecast) when it was too low, forecast - actual when too high: the
quantile ("pinball") loss of the 75th percentile, times 4 (Koenker and Bassett 1978). Too high wastes a
share of a GPU for one interval. Too low makes every request of the interval wait, and the following ones,
until the queue has been worked off. The choice of ``auto`` hardly depends on the 3: 1 to 5 choose about
equally well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.planner.forecasting.series import Series

UNDER_WEIGHT = 3.0
"""Cost of a forecast that is too low, over that of one that is as much too high."""

DISCOUNT = 0.97
"""Factor on the weight of an interval's error per further interval: half after 23 intervals."""


def loss(forecast: float, actual: float) -> float:
    """Return the cost of one forecast, in the unit of the curve."""
    error = actual - forecast
    return UNDER_WEIGHT * error if error > 0 else -error


@dataclass(frozen=True)
class Score:
    """Means over ``count`` forecasts, in the curve's unit: absolute error, loss, and the actual values."""

    count: int
    mean_error: float
    mean_loss: float
    mean_actual: float


def score(forecasts: Sequence[float], series: Series, steps: int, *, discount: float = 1.0) -> Score:
    """Hold every forecast against the interval ``steps`` later; ``discount`` lets newer ones weigh more."""
    count, weight = 0, 0.0
    error = cost = actual = 0.0
    for forecast, came in zip(forecasts, series[steps:], strict=False):
        if came is not None:
            count += 1
            weight = discount * weight + 1
            error = discount * error + abs(came - forecast)
            cost = discount * cost + loss(forecast, came)
            actual = discount * actual + came
    if not count:
        return Score(0, 0.0, 0.0, 0.0)
    return Score(count, error / weight, cost / weight, actual / weight)


def outcomes(forecasts: Sequence[float], series: Series, steps: int) -> tuple[tuple[float, float], ...]:
    """Return what came beyond the forecast, and what came, of each interval that was forecast.

    The newest is the last. (0, 0) is an interval without data.
    """
    return tuple(
        (0.0, 0.0) if came is None else (came - forecast, came)
        for forecast, came in zip(forecasts, series[steps:], strict=False)
    )
