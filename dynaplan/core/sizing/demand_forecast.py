"""From the history of the traffic to what is expected of it: which forecasts a decision needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dynaplan.core.forecasting.lengths import points_of
from dynaplan.core.forecasting.traffic_history import TrafficHistory
from dynaplan.core.sizing.look_ahead import lookahead
from dynaplan.domain.planning.traffic import Expected, Foresight, Lengths
from dynaplan.domain.settings.forecasting import Forecast


class Question(NamedTuple):
    """One forecast: of which curve of the history, and how many intervals ahead."""

    curve: str
    ahead: int

    @property
    def is_count(self) -> bool:
        """Whether the curve is of numbers of requests."""
        return self.curve == REQUESTS


REQUESTS = "requests"


def questions(startup_s: float, interval_s: float) -> list[Question]:
    """What must be foretold for a decision.

    Requests soon, when the workers that it adds are ready, and half way; lengths, which change slowly, once.
    """
    last = lookahead(startup_s, interval_s).intervals
    steps = sorted({1, -(-last // 2), last})
    lengths = [Question(curve, last) for curve in ("isl_tokens", "osl_tokens")]
    return [*(Question(REQUESTS, each) for each in steps), *lengths]


def foresight(history: TrafficHistory, answers: Mapping[Question, Forecast]) -> Foresight:
    """The answers to ``questions``, with the lengths of the requests that were seen."""
    lengths = {asked.curve: told for asked, told in answers.items() if not asked.is_count}
    requests = _value(answers[Question(REQUESTS, 1)])
    isl = _mean_tokens(lengths["isl_tokens"], history.isl, requests)
    osl = _mean_tokens(lengths["osl_tokens"], history.osl, requests)
    expected = tuple(
        Expected(_value(told), isl, osl, ahead=asked.ahead, doubt=told.typical_error, why=told.why)
        for asked, told in answers.items()
        if asked.is_count
    )
    return Foresight(history.interval_s, expected, history.isl, history.osl, history.dispersion)


def _mean_tokens(told: Forecast, seen: Lengths | None, requests: float | None) -> float | None:
    """The forecast, drawn towards the mean over the last minutes by what may be chance.

    The mean over few requests is mostly chance: what is foretold from such means counts as far as it is
    further off than their standard error.
    """
    value = _value(told)
    if value is None or seen is None or not seen.mean_tokens:
        return value
    points = points_of(seen, math.inf)
    variance = max(0.0, points.moment(2) - points.moment(1) ** 2)
    apart = value - seen.mean_tokens
    by_chance = math.sqrt(variance / max(1.0, requests or 0.0))
    return seen.mean_tokens + math.copysign(max(0.0, abs(apart) - by_chance), apart)


def _value(told: Forecast) -> float | None:
    return told.value if told.is_known else None
