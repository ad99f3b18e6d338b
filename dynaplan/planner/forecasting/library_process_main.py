"""The forecasting process: ``python -m dynaplan.planner.forecasting.library_process_main METHOD PARENT_PID``.

It loads the library and says ``{"ready": true}``. Then it answers each line of its standard input, a question
in JSON, with one line on its standard output, until its input ends. A line with ``error`` says in words what
failed; after one in the place of ``ready`` the process ends. It is killed when its parent ends.

======== ========================================================================
question ``series`` (measurements, the newest last, null for a gap), ``steps`` ahead,
         ``interval_s`` between two measurements, ``log1p`` (take logarithms first)
answer   ``value``, and a ``note`` on how it was found
======== ========================================================================
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any, TextIO

from dynaplan.planner.forecasting.libraries import LIBRARIES, load
from dynaplan.planner.forecasting.series import LARGEST_LOG
from dynaplan.process.parent_death import die_with_parent


def main(method: str, parent_pid: int) -> None:
    """Compute a forecast for each line of standard input until it ends, as it does with the parent."""
    os.setpgid(0, 0)  # what the library starts is killed with this process
    die_with_parent(parent_pid)
    answers = _own_output()
    warnings.simplefilter("ignore")
    try:
        load(method)
    except Exception as error:
        _say(answers, _failure(error))
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        try:
            _say(answers, answer(method, json.loads(line)))
        except Exception as error:  # whatever a library fails with, the planner must go on
            _say(answers, _failure(error))


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


def _own_output() -> TextIO:
    """Open the standard output for our answers alone, and send what libraries print to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
