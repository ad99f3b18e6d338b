"""The forecasting process: ``python -m dynaplan.adapters.forecasters.worker METHOD PARENT_PID``.

It says ``{"ready": true}``, or ``{"error": ...}`` and ends; then it answers each line of JSON on its standard
input with one on its standard output, until its input ends. It is killed with its parent.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from dynaplan.adapters.forecasters.libraries import LIBRARIES, load
from dynaplan.core.forecasting.series import LARGEST_LOG
from dynaplan.foundation.guard import die_with_parent


def main(method: str, parent_pid: int) -> None:
    """Answer until the input ends."""
    os.setpgid(0, 0)  # what the library starts is killed with this process
    die_with_parent(parent_pid)
    answers = _own_output()
    warnings.simplefilter("ignore")
    try:
        load(method)
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _say(answers, {"ready": True})
    for line in sys.stdin:
        _say(answers, answer(method, json.loads(line)))


def answer(method: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """The forecast that a question asks for, or the error in words; with the question's id."""
    compute: Callable[..., tuple[float, str]] = LIBRARIES[method]
    series, is_log1p = question["series"], question["log1p"]
    if is_log1p:
        series = [None if each is None else math.log1p(each) for each in series]
    try:
        value, note = compute(series, question["steps"], question["interval_s"])
        if is_log1p:
            value, note = math.expm1(min(value, LARGEST_LOG)), f"{note}, log1p"
    except Exception as error:  # whatever a library fails with, the planner must go on
        return {"id": question["id"], "error": f"{type(error).__name__}: {error}"}
    if not math.isfinite(value):
        return {"id": question["id"], "error": f"it answered {value}"}
    return {"id": question["id"], "value": value, "note": note}


def _own_output() -> TextIO:
    """The standard output for our answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
