"""From the history of the traffic to what is expected of it: which forecasts a decision needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dynaplan.core.sla.ahead import lookahead
from dynaplan.core.sla.history import TrafficHistory
from dynaplan.domain.forecast import Forecast
from dynaplan.domain.traffic import Expected, Foresight


class Question(NamedTuple):
    """One forecast: of which curve of the history, and how many intervals ahead."""

    curve: str
    ahead: int


def questions(startup_s: float, interval_s: float) -> list[Question]:
    """What must be foretold for a decision.

    Requests soon, when the workers that it adds are ready, and half way; lengths, which change slowly, once.
    """
    last = lookahead(startup_s, interval_s).intervals
    steps = sorted({1, -(-last // 2), last})
    lengths = [Question(curve, last) for curve in ("isl_tokens", "osl_tokens")]
    return [*(Question("requests", each) for each in steps), *lengths]


def foresight(history: TrafficHistory, answers: Mapping[Question, Forecast]) -> Foresight:
    """The answers to ``questions``, with the lengths of the requests that were seen."""
    lengths = {asked.curve: told for asked, told in answers.items() if asked.curve != "requests"}
    isl, osl = lengths["isl_tokens"], lengths["osl_tokens"]
    expected = tuple(
        Expected(
            _value(told), _value(isl), _value(osl), ahead=asked.ahead, doubt=told.typical_error, why=told.why
        )
        for asked, told in answers.items()
        if asked.curve == "requests"
    )
    return Foresight(history.interval_s, expected, history.isl, history.osl, history.dispersion)


def _value(told: Forecast) -> float | None:
    return told.value if told.is_known else None
