"""The forecasting process, a helper (``dynaplan.process.helper``): ``process_main ... METHOD``.

``{}`` is answered with ``{}`` when the library is loaded. An answer with ``error`` says in words what failed.

======== ========================================================================
question ``series`` (measurements, the newest last, null for a gap), ``steps`` ahead,
         ``interval_s`` between two measurements, ``log1p`` (take logarithms first)
answer   ``value``, and a ``note`` on how it was found
======== ========================================================================
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from dynaplan.planner.forecasting.series import MAX_LOG, Series, fill_gaps
from dynaplan.process.helper_main import become_helper

EPOCH = datetime(2024, 1, 1)
"""The time that Prophet gets for the first measurement, as in the original."""


def arima(series: Series, steps: int, interval_s: float) -> tuple[float, str]:
    """Forecast by the order that ``auto_arima`` finds for these values; return the order, too, in words.

    When that is (0, d, 0), whose forecast is a straight line, the logarithms are taken, as Dynamo's planner
    does. A gap gets the value before it, since the library takes no gaps.
    """
    values = tuple(fill_gaps(series))
    model = _auto_arima(values)
    order = tuple(int(each) for each in model.order)
    if order[0] == order[2] == 0:
        model = _auto_arima(tuple(math.log1p(each) for each in values))
        in_logarithms = tuple(int(each) for each in model.order)
        logarithm = min(_predict_last(model, steps), MAX_LOG)
        return math.expm1(logarithm), f"arima{in_logarithms} of the logarithm"
    return _predict_last(model, steps), f"arima{order}"


@lru_cache(maxsize=2)  # a curve is asked for several numbers of steps in a row
def _auto_arima(values: tuple[float, ...]) -> Any:
    numpy, pmdarima = importlib.import_module("numpy"), importlib.import_module("pmdarima")
    return pmdarima.auto_arima(numpy.asarray(values), suppress_warnings=True, error_action="ignore")


def _predict_last(model: Any, steps: int) -> float:
    return float(list(model.predict(n_periods=steps))[-1])


def prophet(series: Series, steps: int, interval_s: float) -> tuple[float, str]:
    """Forecast by Prophet with its defaults, fitted anew; gaps are left out."""
    pandas, library = importlib.import_module("pandas"), importlib.import_module("prophet")
    known = [(index, value) for index, value in enumerate(series) if value is not None]
    frame = pandas.DataFrame(
        {"ds": [_time_of(index, interval_s) for index, _ in known], "y": [value for _, value in known]}
    )
    model = library.Prophet()
    model.fit(frame)
    target = pandas.DataFrame({"ds": [_time_of(len(series) - 1 + steps, interval_s)]})
    return float(list(model.predict(target)["yhat"])[-1]), "prophet"


def _time_of(index: int, interval_s: float) -> datetime:
    return EPOCH + timedelta(seconds=index * interval_s)


def load(method: str) -> None:
    """Import the method's modules: that takes seconds, and the first forecast should not pay for it."""
    for noisy in ("cmdstanpy", "prophet", "prophet.plot"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    for module in LIBRARIES[method]:
        importlib.import_module(module)


FORECASTERS: Mapping[str, Callable[[Series, int, float], tuple[float, str]]] = {
    "arima": arima,
    "prophet": prophet,
}
"""The function of each method."""

LIBRARIES: Mapping[str, Sequence[str]] = {
    "arima": ("numpy", "pmdarima"),
    "prophet": ("pandas", "prophet"),
}
"""The modules that each method imports; the last one is also the name of the package to install."""


def main(arguments: Sequence[str]) -> None:
    """Load the library, and compute a forecast for each question."""
    channel, (method,) = become_helper(arguments)
    warnings.simplefilter("ignore")
    fault: dict[str, Any] = {}
    try:
        load(method)
    except Exception as error:
        fault = _failure(error)
    for question, _ in channel:
        try:
            channel.answer(fault or (answer(method, question) if question else {}))
        except Exception as error:  # whatever a library fails with, the planner must go on
            channel.answer(_failure(error))


def answer(method: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the forecast that a question asks for; raises what the library raises."""
    series, is_log1p = question["series"], question["log1p"]
    if is_log1p:
        series = [None if value is None else math.log1p(value) for value in series]
    value, note = FORECASTERS[method](series, question["steps"], question["interval_s"])
    if is_log1p:
        value, note = math.expm1(min(value, MAX_LOG)), f"{note}, log1p"
    if not math.isfinite(value):
        return {"error": f"it answered {value}"}
    return {"value": value, "note": note}


def _failure(error: Exception) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1:])
