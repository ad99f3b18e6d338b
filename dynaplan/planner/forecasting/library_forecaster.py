"""The forecaster that the settings name; ARIMA and Prophet are computed by a library in another process."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaplan.config.settings.planner import (
    HISTORY_INTERVALS,
    OUTSIDE_PREDICTORS,
    Forecast,
    ForecastSettings,
)
from dynaplan.engines.server.child import SECRET_PREFIXES
from dynaplan.planner.forecasting.forecaster import CoreForecaster, forecast_last_value
from dynaplan.planner.forecasting.library_process import LIBRARIES
from dynaplan.planner.forecasting.series import Series, clean_history
from dynaplan.planner.ports import Forecaster
from dynaplan.planner.timing import LIBRARY_LOAD_S
from dynaplan.process.helper import HelperFailed, HelperLimits, HelperProcess, helper_environment
from dynaplan.util.errors import ConfigError, TemporaryError

log = logging.getLogger(__name__)

MIN_POINTS = 5
"""The number of measurements from which on a library is asked; before, the last value is the forecast."""

ARIMA_WINDOW = 50
"""The number of newest intervals that ARIMA sees, as in the original."""

MAIN = "dynaplan.planner.forecasting.library_process"
"""The module that the process runs."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that are set to 1: many threads make small linear algebra a hundred times slower."""


def check_installed(method: str) -> None:
    """Raise ConfigError, with the line that installs it, when the method's library is missing."""
    for module in LIBRARIES[method]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"load-predictor is {method!r}, but the Python module {module} is not installed",
                hint=f"Run: pip install {LIBRARIES[method][-1]}. Or choose kalman or constant.",
            )


def make_forecaster(settings: ForecastSettings, interval_s: float) -> Forecaster:
    """Return the forecaster that ``load_predictor`` names; ``interval_s`` is the time from value to value.

    Raises ConfigError when the library that ``load_predictor`` needs is not installed.
    """
    if settings.load_predictor not in OUTSIDE_PREDICTORS:
        return CoreForecaster(settings)
    check_installed(settings.load_predictor)
    return LibraryForecaster(settings, interval_s)


class LibraryForecaster:
    """See ``dynaplan.planner.ports.Forecaster``. The first forecast that needs the process starts it.

    When the process fails, or takes longer than ``load_predictor_deadline_s``, the last value is forecast.
    A process that computes past its deadline is killed, since nothing else stops it, and the next forecast
    starts another one. Forecasts are computed one after another; waiting for the others counts as time taken.
    """

    def __init__(self, settings: ForecastSettings, interval_s: float) -> None:
        self._settings = settings
        self._method = settings.load_predictor
        self._interval_s = interval_s
        self._library: _Library | None = None
        self._lock = asyncio.Lock()
        self._failures: set[str] = set()

    async def forecast(self, history: Sequence[float | None], steps: int) -> Forecast:
        """Ask the library; never raises. After a failure the forecast is the last value, and says why."""
        window = self._settings.prophet_window_size if self._method == "prophet" else ARIMA_WINDOW
        series = clean_history(history[-HISTORY_INTERVALS:], HISTORY_INTERVALS)[-window:]
        known = [value for value in series if value is not None]
        if len(known) < MIN_POINTS:
            return forecast_last_value(
                history, f"{self._method} is warming up, {len(known)} of {MIN_POINTS} measurements"
            )
        if self._method == "arima" and min(known) == max(known):
            return forecast_last_value(history, "arima of a series that does not change")
        deadline_s = self._settings.load_predictor_deadline_s
        try:
            async with asyncio.timeout(deadline_s), self._lock:
                return await self._compute(series, max(1, steps))
        except TimeoutError:
            if self._library and not self._library.loading.done():
                return self._fall_back(history, f"{self._method} is still loading after {deadline_s:g} s")
            return self._fall_back(history, f"{self._method} took longer than {deadline_s:g} s")
        except (TemporaryError, HelperFailed, OSError, ValueError) as error:
            return self._fall_back(history, f"{self._method} failed: {error}")

    async def forecast_all(self, requests: Sequence[tuple[Sequence[float | None], int]]) -> list[Forecast]:
        return await asyncio.gather(*(self.forecast(history, steps) for history, steps in requests))

    async def close(self) -> None:
        """Kill the process, if there is one; return when it is gone."""
        library, self._library = self._library, None
        if library:
            await library.close()

    def _fall_back(self, history: Sequence[float | None], reason: str) -> Forecast:
        if reason not in self._failures:
            self._failures.add(reason)
            log.warning("forecasting by the last value: %s", reason)
        return forecast_last_value(history, reason)

    async def _compute(self, series: Series, steps: int) -> Forecast:
        longest_s = max(LIBRARY_LOAD_S, self._settings.load_predictor_deadline_s)
        library = self._library = self._library or _Library(self._method, longest_s)
        question = {
            "series": series,
            "steps": steps,
            "interval_s": self._interval_s,
            "log1p": self._settings.load_predictor_log1p,
        }
        is_asked = False
        try:
            await asyncio.shield(library.loading)  # which goes on when the forecast that began it ends
            is_asked = True
            answer = await library.ask(question)
        except BaseException:
            if is_asked or library.loading.done():  # late or dead: another forecast starts another process
                await self.close()
            raise
        if "error" in answer:
            raise TemporaryError(str(answer["error"]))
        return Forecast(max(0.0, float(answer["value"])), self._method, str(answer["note"]))


class _Library:
    """A process that loads a library and computes with it; ``loading`` fails when it cannot be loaded."""

    def __init__(self, method: str, longest_s: float) -> None:
        # Prophet leaves files behind when it is killed; they go with the directory.
        self._directory = tempfile.TemporaryDirectory(prefix="dynaplan-forecast-")
        self._stderr_path = Path(self._directory.name) / "stderr.txt"
        environment = _environment() | {"TMPDIR": self._directory.name}
        with self._stderr_path.open("wb") as complaints:
            self._stderr = os.dup(complaints.fileno())
        limits = HelperLimits(longest_s)
        self._helper = HelperProcess(MAIN, (method,), limits, environment, self._stderr)
        self.loading = asyncio.create_task(self._load(), name=f"load {method}")

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one question, or its ``error``; TemporaryError when the process ends."""
        try:
            answer, _ = await self._helper.ask(question)
        except HelperFailed as failure:
            raise TemporaryError(f"{failure}{self._last_error_line()}") from None
        return answer

    async def close(self) -> None:
        """Kill the process and its children; return when it is gone and its files are."""
        await self._helper.close()
        await asyncio.gather(self.loading, return_exceptions=True)
        os.close(self._stderr)
        self._directory.cleanup()

    async def _load(self) -> None:
        answer = await self.ask({})
        if "error" in answer:
            raise TemporaryError(str(answer["error"]))

    def _last_error_line(self) -> str:
        text = self._stderr_path.read_text(errors="replace")
        return "".join(f": {line}" for line in text.strip().splitlines()[-1:])


def _environment() -> dict[str, str]:
    """Return our environment without secrets, and with one thread for the numeric libraries."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SECRET_PREFIXES)}
    return environment | helper_environment() | dict.fromkeys(THREADS, "1")
