"""Forecasts by the core's own methods, computed at once."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.config.settings.planner import Forecast, ForecastSettings
from dynaplan.planner.forecasting.forecaster import forecast


class CoreForecaster:
    """See ``dynaplan.planner.ports.Forecaster``; for ``constant``, ``kalman`` and ``auto``."""

    def __init__(self, settings: ForecastSettings) -> None:
        self._settings = settings

    async def forecast(
        self, history: Sequence[float | None], steps: int, *, is_count: bool = False
    ) -> Forecast:
        """Compute the forecast: a few milliseconds at most, for the longest history."""
        return forecast(history, steps, self._settings, is_count=is_count)

    async def close(self) -> None:
        """Do nothing: no process and no file is open."""
