"""The forecasting process, a helper (``dynaplan.process.helper``): ``process_main ... METHOD``.

``{}`` is answered with ``{}`` when the library is loaded. An answer with ``error`` says in words what failed.

======== ========================================================================
question ``series`` (measurements, the newest last, null for a gap), ``steps`` ahead,
         ``interval_s`` between two measurements, ``log1p`` (take logarithms first)
answer   ``value``, and a ``note`` on how it was found
======== ========================================================================
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.planner.forecasting.libraries import LIBRARIES, load
from dynaplan.planner.forecasting.series import LARGEST_LOG
from dynaplan.process.helper_main import become_helper


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
    value, note = LIBRARIES[method](series, question["steps"], question["interval_s"])
    if is_log1p:
        value, note = math.expm1(min(value, LARGEST_LOG)), f"{note}, log1p"
    if not math.isfinite(value):
        return {"error": f"it answered {value}"}
    return {"value": value, "note": note}


def _failure(error: Exception) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1:])
