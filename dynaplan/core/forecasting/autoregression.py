"""Linear prediction: the load ``steps`` ahead as a weighted sum of the last intervals' loads.

The weights are learnt as the series goes by (recursive least squares with forgetting), for exactly the
asked number of steps. They find a wave without being told its period: two intervals determine a sinusoid,
four leave room for noise and are learnt within a period.
"""

from __future__ import annotations

from operator import mul

from dynaplan.core.forecasting.series import Series, carried_on
from dynaplan.domain.settings.forecasting import ForecastSettings

LAGS = 4
FORGETTING = 0.99
"""The weight of one interval's evidence after the next one."""

INITIAL_DOUBT = 10.0
"""The variance of each weight to begin with, where the load is about 1."""

CAP = 1.5
CAP_WINDOW = 30
"""No forecast is above so many times the most of so many intervals, nor below such a part of the least:
learning may overshoot."""


def autoregression(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """See the module. The last value while there are too few intervals; gaps are taken as unchanged."""
    values = carried_on(series)
    if len(values) < LAGS:
        return values
    # Weights start as "like now", which a few intervals' evidence overrules.
    unit = sum(values[:LAGS]) / LAGS or 1.0
    weights = [0.0, 1.0] + [0.0] * (LAGS - 1)
    doubt = [[INITIAL_DOUBT * (row == column) for column in range(LAGS + 1)] for row in range(LAGS + 1)]
    forecasts = values[: LAGS - 1]
    for now in range(LAGS - 1, len(values)):
        if now - steps >= LAGS - 1 and series[now] is not None:
            seen = _features(values, now - steps, unit)
            weights, doubt = _learnt(weights, doubt, seen, values[now] / unit)
        expected = unit * _product(weights, _features(values, now, unit))
        recent = values[max(0, now + 1 - CAP_WINDOW) : now + 1]
        forecasts.append(min(max(expected, min(recent) / CAP), CAP * max(recent)))
    return forecasts


def _features(values: list[float], now: int, unit: float) -> list[float]:
    """A constant and the last loads, the newest first."""
    return [1.0, *(each / unit for each in values[now + 1 - LAGS : now + 1][::-1])]


def _learnt(
    weights: list[float], doubt: list[list[float]], seen: list[float], outcome: float
) -> tuple[list[float], list[list[float]]]:
    """The weights, and what is not known about them, after one outcome."""
    spread = [_product(row, seen) for row in doubt]
    scale = FORGETTING + _product(seen, spread)
    surprise = (outcome - _product(weights, seen)) / scale
    weights = [old + each * surprise for old, each in zip(weights, spread, strict=True)]
    shares = [each / (scale * FORGETTING) for each in spread]
    doubt = [
        [old / FORGETTING - share * each for old, each in zip(row, spread, strict=True)]
        for row, share in zip(doubt, shares, strict=True)
    ]
    return weights, doubt


def _product(left: list[float], right: list[float]) -> float:
    return float(sum(map(mul, left, right)))
