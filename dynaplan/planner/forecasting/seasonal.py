"""Repeating load: the period is found by autocorrelation, the forecast is the mean of earlier periods.

The autocorrelation of a series z with mean m and variance v at lag k is sum (z(t) - m) (z(t-k) - m) / (n -
k) / v (Box and Jenkins, Time Series Analysis, 1970). The period is the lag of the first peak above 0.5
after the correlation first falls below 0, from 4 to 100 intervals, seen at least twice. The forecast for a
moment is the mean of the same moment in up to three earlier periods; while there is no clear period, the
moving level.

Wrong where load repeats at another height, or with a period longer than 100 intervals.
"""

from __future__ import annotations

from functools import lru_cache
from operator import add

from dynaplan.config.settings.planner import ForecastSettings
from dynaplan.planner.forecasting.series import Series, fill_gaps
from dynaplan.planner.forecasting.smoothing import level

MIN_PERIOD = 4
"""Shortest period that is searched for, intervals."""

MAX_PERIOD = 100
"""Longest period that is searched for, intervals."""

PERIODS_AVERAGED = 3
"""Number of earlier periods in the mean."""

MIN_CORRELATION = 0.5
"""Lowest autocorrelation of a peak that counts as a period."""

SEARCH_EVERY = 4
"""Intervals between two searches for the period, which does not change with every interval."""


def seasonal(series: Series, steps: int, settings: ForecastSettings) -> list[float]:
    """Forecast the mean of the same moment in earlier periods;

    the moving level while there is no clear period.
    """
    values, forecasts = fill_gaps(series), level(series, steps, settings)
    for now, period in enumerate(_periods(tuple(values))):
        if period:
            # The last moment at or before now that lies whole periods before the target.
            newest = now + steps - period * -(-steps // period)
            alike = values[newest::-period][:PERIODS_AVERAGED]
            forecasts[now] = sum(alike) / len(alike)
    return forecasts


@lru_cache(maxsize=2)
def _periods(values: tuple[float, ...]) -> list[int]:
    """Return the period as it is known at each interval, 0 for none; a decision asks for several horizons."""
    correlations, period, periods = _Correlations(), 0, []
    for now, value in enumerate(values):
        correlations.add(value)
        if now % SEARCH_EVERY == 0:
            period = correlations.period()
        periods.append(period)
    return periods


class _Correlations:
    """Autocorrelations of a growing series. Sums of products are kept, so adding a value is one pass."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._products = [0.0] * (MAX_PERIOD + 1)

    def add(self, value: float) -> None:
        self._values.append(value)
        newest_first = self._values[: -MAX_PERIOD - 2 : -1]
        added = map(add, self._products, map(value.__mul__, newest_first))
        self._products[: len(newest_first)] = list(added)

    def period(self) -> int:
        """Return the lag of the first clear peak after the first dip below 0; 0 when there is none."""
        count, longest = len(self._values), min(MAX_PERIOD, len(self._values) // 2)
        if longest <= MIN_PERIOD:
            return 0
        correlations = self._by_lag(count, longest)
        dip = next((lag for lag, correlation in enumerate(correlations) if correlation < 0), longest)
        for lag in range(max(dip, MIN_PERIOD), longest):
            here = correlations[lag]
            if here > MIN_CORRELATION and correlations[lag - 1] <= here >= correlations[lag + 1]:
                return lag
        return 0

    def _by_lag(self, count: int, longest: int) -> list[float]:
        """Return the correlations of lags 0 to ``longest``; all 0 for a series that never changes."""
        mean = sum(self._values) / count
        variance = self._products[0] / count - mean * mean
        if variance <= 1e-9 * mean * mean:
            return [0.0] * (longest + 1)
        early = late = count * mean
        correlations = []
        for lag in range(longest + 1):
            # early sums all but the last lag values, late all but the first.
            covariance = self._products[lag] - mean * (early + late) + (count - lag) * mean * mean
            correlations.append(covariance / (count - lag) / variance)
            early -= self._values[count - 1 - lag]
            late -= self._values[lag]
        return correlations
