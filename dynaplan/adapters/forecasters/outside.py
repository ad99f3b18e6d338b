"""Forecasts by a library in a process of its own: ARIMA and Prophet."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Sequence

from dynaplan.adapters.forecasters.libraries import MODULES
from dynaplan.adapters.forecasters.process import ForecastingProcess
from dynaplan.core.forecasting.forecaster import last_known
from dynaplan.core.forecasting.series import Series, measured
from dynaplan.domain.errors import ConfigError, TemporaryError
from dynaplan.domain.settings.forecasting import HISTORY_INTERVALS, Forecast, ForecastSettings

log = logging.getLogger(__name__)

FEWEST_POINTS = 5
ARIMA_WINDOW = 50
LOADING_S = 120.0
"""How long the library may take to load: seconds on a free machine, a minute on a loaded one."""


def check_installed(method: str) -> None:
    """Raise ConfigError, with the line that installs it, when the method's library is not here."""
    for module in MODULES[method]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"load-predictor is {method!r}, but the Python module {module} is not installed",
                hint=f"Run: pip install {MODULES[method][-1]}. Or choose auto, kalman or constant.",
            )


class OutsideForecaster:
    """See ``dynaplan.ports.Forecaster``. The process is started by the first forecast that needs it.

    Whatever goes wrong with it, or takes longer than ``load_predictor_deadline_s``, gives the last value. One
    that computes past its deadline is killed, since nothing else stops it, and started again by the next
    forecast. Forecasts are computed one after another.
    """

    def __init__(self, settings: ForecastSettings, interval_s: float) -> None:
        self._settings = settings
        self._method = settings.load_predictor
        self._interval_s = interval_s
        self._process: ForecastingProcess | None = None
        self._loading: asyncio.Task[ForecastingProcess] | None = None
        self._turn = asyncio.Lock()
        self._failures: set[str] = set()

    async def forecast(
        self, history: Sequence[float | None], steps: int, *, is_count: bool = False
    ) -> Forecast:
        """Never raises; a failure is a forecast by the last value, which says so."""
        window = self._settings.prophet_window_size if self._method == "prophet" else ARIMA_WINDOW
        series = measured(history[-HISTORY_INTERVALS:], HISTORY_INTERVALS)[-window:]
        known = [each for each in series if each is not None]
        if len(known) < FEWEST_POINTS:
            return last_known(
                history, f"{self._method} is warming up, {len(known)} of {FEWEST_POINTS} measurements"
            )
        if self._method == "arima" and min(known) == max(known):
            return last_known(history, "arima of a series that does not change")
        deadline_s = self._settings.load_predictor_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                async with self._turn:
                    return await self._computed(series, max(1, steps))
        except TimeoutError:
            if self._loading is not None and not self._loading.done():
                return self._failed(history, f"{self._method} is still loading after {deadline_s:g} s")
            return self._failed(history, f"{self._method} took longer than {deadline_s:g} s")
        except (TemporaryError, OSError, ValueError) as error:
            return self._failed(history, f"{self._method} failed: {error}")

    def _failed(self, history: Sequence[float | None], reason: str) -> Forecast:
        if reason not in self._failures:
            self._failures.add(reason)
            log.warning("forecasting by the last value: %s", reason)
        return last_known(history, reason)

    async def _computed(self, series: Series, steps: int) -> Forecast:
        process = await self._ready_process()
        question = {
            "series": series,
            "steps": steps,
            "interval_s": self._interval_s,
            "log1p": self._settings.load_predictor_log1p,
        }
        try:
            answer = await process.ask(question)
        except BaseException:
            # Late, cancelled or dead: nobody can tell what it would say next.
            await self._abandon()
            raise
        if "error" in answer:
            raise TemporaryError(str(answer["error"]))
        return Forecast(max(0.0, float(answer["value"])), self._method, str(answer["note"]))

    async def _ready_process(self) -> ForecastingProcess:
        """The process, its library loaded. Loading goes on when the forecast that began it is given up."""
        if self._process is not None and self._process.has_ended:
            await self._abandon()
        if self._process is None:
            if self._loading is None or has_failed(self._loading):
                self._loading = asyncio.create_task(self._load())
                self._loading.add_done_callback(has_failed)  # it may fail when nobody waits for it any more
            self._process = await asyncio.shield(self._loading)
        return self._process

    async def _load(self) -> ForecastingProcess:
        process = await ForecastingProcess.spawn(self._method)
        try:
            async with asyncio.timeout(LOADING_S):
                await process.ready()
        except TimeoutError:
            await process.close()
            raise TemporaryError(f"its library did not load within {LOADING_S:g} s") from None
        except BaseException:
            await process.close()
            raise
        return process

    async def _abandon(self) -> None:
        process, self._process = self._process, None
        self._loading = None
        if process is not None:
            await process.close()

    async def close(self) -> None:
        """Kill the process; return when it is gone."""
        loading = self._loading
        if loading is not None and self._process is None:
            loading.cancel()
            await asyncio.wait({loading})
            if not loading.cancelled() and loading.exception() is None:
                self._process = loading.result()
        await self._abandon()


def has_failed(task: asyncio.Task[ForecastingProcess]) -> bool:
    """Whether the task has ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)
