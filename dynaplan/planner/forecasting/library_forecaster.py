"""Forecasts by a library in a process of its own: ARIMA and Prophet."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Sequence

from dynaplan.config.settings.planner import HISTORY_INTERVALS, Forecast, ForecastSettings
from dynaplan.planner.forecasting.forecaster import last_known
from dynaplan.planner.forecasting.libraries import MODULES
from dynaplan.planner.forecasting.library_process import ForecastingProcess
from dynaplan.planner.forecasting.series import Series, measured
from dynaplan.util.errors import ConfigError, TemporaryError

log = logging.getLogger(__name__)

FEWEST_POINTS = 5
"""The number of measurements from which on a library is asked; before, the last value is the forecast."""

ARIMA_WINDOW = 50
"""The number of newest intervals that ARIMA sees, as in the original."""

LOADING_S = 120.0
"""Seconds that the library may take to load: a few on a free machine, a minute on a loaded one."""


def check_installed(method: str) -> None:
    """Raise ConfigError, with the line that installs it, when the method's library is missing."""
    for module in MODULES[method]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"load-predictor is {method!r}, but the Python module {module} is not installed",
                hint=f"Run: pip install {MODULES[method][-1]}. Or choose auto, kalman or constant.",
            )


class LibraryForecaster:
    """See ``dynaplan.planner.ports.Forecaster``. The first forecast that needs the process starts it.

    When the process fails, or takes longer than ``load_predictor_deadline_s``, the last value is forecast.
    A process that computes past its deadline is killed, since nothing else stops it, and the next forecast
    starts another one. Forecasts are computed one after another.
    """

    def __init__(self, settings: ForecastSettings, interval_s: float) -> None:
        self._settings = settings
        self._method = settings.load_predictor
        self._interval_s = interval_s
        self._starting: asyncio.Task[ForecastingProcess] | None = None
        self._turn = asyncio.Lock()
        self._failures: set[str] = set()

    async def forecast(
        self, history: Sequence[float | None], steps: int, *, is_count: bool = False
    ) -> Forecast:
        """Ask the library; never raises. After a failure the forecast is the last value, and says why."""
        window = self._settings.prophet_window_size if self._method == "prophet" else ARIMA_WINDOW
        series = measured(history[-HISTORY_INTERVALS:], HISTORY_INTERVALS)[-window:]
        known = [value for value in series if value is not None]
        if len(known) < FEWEST_POINTS:
            return last_known(
                history, f"{self._method} is warming up, {len(known)} of {FEWEST_POINTS} measurements"
            )
        if self._method == "arima" and min(known) == max(known):
            return last_known(history, "arima of a series that does not change")
        deadline_s = self._settings.load_predictor_deadline_s
        try:
            async with asyncio.timeout(deadline_s), self._turn:
                return await self._computed(series, max(1, steps))
        except TimeoutError:
            if self._starting is not None and not self._starting.done():
                return self._failed(history, f"{self._method} is still loading after {deadline_s:g} s")
            return self._failed(history, f"{self._method} took longer than {deadline_s:g} s")
        except (TemporaryError, OSError, ValueError) as error:
            return self._failed(history, f"{self._method} failed: {error}")

    async def close(self) -> None:
        """Kill the process, if there is one; return when it is gone."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            for started in await asyncio.gather(starting, return_exceptions=True):
                if isinstance(started, ForecastingProcess):
                    await started.close()

    def _failed(self, history: Sequence[float | None], reason: str) -> Forecast:
        if reason not in self._failures:
            self._failures.add(reason)
            log.warning("forecasting by the last value: %s", reason)
        return last_known(history, reason)

    async def _computed(self, series: Series, steps: int) -> Forecast:
        process = await self._process()
        question = {
            "series": series,
            "steps": steps,
            "interval_s": self._interval_s,
            "log1p": self._settings.load_predictor_log1p,
        }
        try:
            answer = await process.ask(question)
        except BaseException:  # late, cancelled or dead: a later answer could be that of this question
            await self.close()
            raise
        if "error" in answer:
            raise TemporaryError(str(answer["error"]))
        return Forecast(max(0.0, float(answer["value"])), self._method, str(answer["note"]))

    async def _process(self) -> ForecastingProcess:
        """Return the process, its library loaded. Loading goes on when the forecast that began it ends."""
        starting = self._starting
        if starting is None or (starting.done() and _is_lost(starting)):
            await self.close()
            starting = self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(starting)

    async def _start(self) -> ForecastingProcess:
        process = await ForecastingProcess.spawn(self._method)
        try:
            async with asyncio.timeout(LOADING_S):
                await process.ready()
        except BaseException as error:
            await process.close()
            if isinstance(error, TimeoutError):
                raise TemporaryError(f"its library did not load within {LOADING_S:g} s") from None
            raise
        return process


def _is_lost(starting: asyncio.Task[ForecastingProcess]) -> bool:
    """Tell whether the start failed, or the process that it started has ended."""
    return starting.cancelled() or starting.exception() is not None or starting.result().has_ended
