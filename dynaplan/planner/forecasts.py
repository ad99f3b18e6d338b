"""Traffic at the end of an interval: the measured one, and its forecast."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dynaplan.planner.forecasting.traffic_history import TrafficHistory
from dynaplan.planner.sizing.demand_forecast import forecast_traffic

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.gateway.traffic import Traffic
    from dynaplan.planner.forecasting.warm_start import IntervalLoad
    from dynaplan.planner.model.traffic import Foresight
    from dynaplan.planner.ports import Forecaster, TrafficSource
    from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)


class TrafficWatch:
    """Reads a source of traffic, keeps its history, and has it forecast.

    ``before`` is the history that a warm-up trace gives.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        source: TrafficSource,
        forecaster: Forecaster,
        clock: Clock,
        before: Iterable[IntervalLoad] = (),
    ) -> None:
        self._settings = settings
        self._source = source
        self._forecaster = forecaster
        self._clock = clock
        self._history = TrafficHistory(settings.adjustment_interval_s, before)
        self._seen_s = clock.now_s()
        self._missing = ""

    async def pull(self) -> None:
        """Have the source take one sample of the frontends' traffic."""
        await self._source.pull()

    async def look(self, startup_s: float) -> tuple[Traffic, Foresight]:
        """Return the traffic since the last look, and the forecast until a worker started now is ready."""
        now_s = self._clock.now_s()
        traffic = await self._source.traffic(max(now_s - self._seen_s, 1e-3))
        self._seen_s = now_s
        self._log_missing(traffic.missing if traffic.requests is None else "")
        self._history.add(traffic)
        forecast = self._forecaster.forecast
        return traffic, await forecast_traffic(self._history, forecast, startup_s, self._settings)

    async def close(self) -> None:
        """Close the source's connections, and end the processes that compute forecasts."""
        await self._source.close()
        await self._forecaster.close()

    def _log_missing(self, missing: str) -> None:
        if missing and not self._missing:
            log.warning("the traffic is not known: %s", missing)
        elif self._missing and not missing:
            log.info("the traffic is known again")
        self._missing = missing
