"""Linear prediction: the load ``steps`` ahead as a weighted sum of the last four intervals' loads.

With x = (1, z(t), z(t-1), z(t-2), z(t-3)) in units of the mean of the first four loads, the forecast is w .
x. The weights w are learnt for exactly that number of steps by recursive least squares with forgetting
(Ljung and Soderstrom, Theory and Practice of Recursive Identification, 1983). With the outcome y of
features x, and P the matrix of what is not known of w:

    k = P x / (f + x' P x)    w <- w + k (y - w . x)    P <- (P - k x' P) / f      f = 0.99

This finds a wave without knowing its period: two intervals determine a sinusoid, four leave room for
noise and are learnt within a period. The weights start as "like now". It overshoots after a jump, so
forecasts are capped.
"""

from __future__ import annotations

from operator import mul

from dynaplan.config.settings.planner import ForecastSettings
from dynaplan.planner.forecasting.series import Series, fill_gaps

LAGS = 4
"""Number of past intervals in the weighted sum."""

FORGETTING = 0.99
"""Factor on the weight of an interval's evidence per further interval."""

INITIAL_WEIGHT_VARIANCE = 10.0
"""Variance of each weight to begin with, where the load is about 1."""

CAP = 1.5
"""Factor over the highest (under the lowest) recent load beyond which no forecast goes: learning may
overshoot."""

CAP_WINDOW = 30
"""Number of intervals that count as recent for ``CAP``."""


def autoregression(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Forecast by linear prediction;

    the last value while there are too few intervals. Gaps count as unchanged.
    """
    values = fill_gaps(series)
    if len(values) < LAGS:
        return values
    # Weights start as "like now", which a few intervals' evidence overrules.
    unit = sum(values[:LAGS]) / LAGS or 1.0
    weights = [0.0, 1.0] + [0.0] * (LAGS - 1)
    covariance = [
        [INITIAL_WEIGHT_VARIANCE * (row == column) for column in range(LAGS + 1)] for row in range(LAGS + 1)
    ]
    forecasts = values[: LAGS - 1]
    for now in range(LAGS - 1, len(values)):
        if now - steps >= LAGS - 1 and series[now] is not None:
            seen = _features(values, now - steps, unit)
            weights, covariance = _update_weights(weights, covariance, seen, values[now] / unit)
        expected = unit * _inner_product(weights, _features(values, now, unit))
        recent = values[max(0, now + 1 - CAP_WINDOW) : now + 1]
        forecasts.append(min(max(expected, min(recent) / CAP), CAP * max(recent)))
    return forecasts


def _features(values: list[float], now: int, unit: float) -> list[float]:
    """Return x: a constant and the last loads, the newest first."""
    return [1.0, *(value / unit for value in values[now + 1 - LAGS : now + 1][::-1])]


def _update_weights(
    weights: list[float], covariance: list[list[float]], seen: list[float], outcome: float
) -> tuple[list[float], list[list[float]]]:
    spread = [_inner_product(row, seen) for row in covariance]
    scale = FORGETTING + _inner_product(seen, spread)
    surprise = (outcome - _inner_product(weights, seen)) / scale
    weights = [old + gain * surprise for old, gain in zip(weights, spread, strict=True)]
    shares = [gain / (scale * FORGETTING) for gain in spread]
    covariance = [
        [old / FORGETTING - share * gain for old, gain in zip(row, spread, strict=True)]
        for row, share in zip(covariance, shares, strict=True)
    ]
    return weights, covariance


def _inner_product(left: list[float], right: list[float]) -> float:
    return float(sum(map(mul, left, right)))
