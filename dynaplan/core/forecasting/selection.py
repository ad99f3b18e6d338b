"""The predictor ``auto``: the method whose forecasts were the best over the recent past.

Nothing is remembered between two calls: for every interval of the series it is worked out which method would
have been chosen then. So the choice, with its reluctance to change, follows from the series alone, and what
``auto`` itself would have forecast is known for every interval too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynaplan.core.forecasting.backtest import DISCOUNT, loss
from dynaplan.core.forecasting.series import Series

RELUCTANCE = 0.1
"""By which part of its loss the method in use must be beaten before another one takes its place.

The more clearly, the less is known: with so few comparisons as ``n``, by ``1 / n`` more.
"""

FEWEST_COMPARED = 5
"""Forecasts whose outcome is known, before any choice is made."""

SURPRISE = 3.0
"""By so many times its usual error the load must be over what was forecast for it, to be news and not noise.

With errors that are spread normally it happens in one interval of a hundred.
"""


@dataclass(frozen=True)
class Choice:
    """``methods`` and ``forecasts`` of every interval; ``losses`` are relative to the mean load, as of now.

    ``compared`` counts the forecasts whose outcome is known; there are no losses while they are too few.
    """

    methods: tuple[str, ...]
    forecasts: tuple[float, ...]
    losses: Mapping[str, float]
    compared: int

    @property
    def why(self) -> str:
        """Which method, and how the others did."""
        method = self.methods[-1]
        if not self.losses:
            return f"auto: {method}, because only {self.compared} forecasts can be compared yet"
        others = (f"{name} {each:.3f}" for name, each in self.losses.items() if name != method)
        stays = "" if self.losses[method] <= min(self.losses.values()) else "; none is clearly better"
        return (
            f"auto: {method}, weighted error {self.losses[method]:.3f} of the load over the last "
            f"{self.compared} intervals ({', '.join(others)}{stays})"
        )


def choose(
    told: Mapping[str, Sequence[float]],
    series: Series,
    steps: int,
    beginning: tuple[str, Sequence[float]] | None = None,
) -> Choice:
    """Which of the methods to believe. ``told`` has for each its forecasts for every interval of the series.

    Until ``FEWEST_COMPARED`` outcomes are known the ``beginning``, a name and its forecasts, is used, or else
    the first one; of equals the one that comes first.
    Load that is far over what was forecast for it is the least that is forecast: none of what the methods
    have learnt holds any more, and to learn anew takes them several intervals.
    """
    method = next(iter(told))
    begins, early = beginning or (method, told[method])
    totals = dict.fromkeys(told, 0.0)
    methods: list[str] = []
    forecasts: list[float] = []
    compared, weight, actual, error = 0, 0.0, 0.0, 0.0
    for now, came in enumerate(series):
        least = 0.0
        if came is not None and now >= steps:
            surprise = came - forecasts[now - steps]
            if compared >= FEWEST_COMPARED and surprise > SURPRISE * error / weight:
                least = came
            error = DISCOUNT * error + abs(surprise)
            compared += 1
            weight, actual = DISCOUNT * weight + 1, DISCOUNT * actual + came
            for name, each in told.items():
                totals[name] = DISCOUNT * totals[name] + loss(each[now - steps], came)
            if compared >= FEWEST_COMPARED:
                best = min(totals, key=totals.__getitem__)
                if totals[best] < (1 - RELUCTANCE - 1 / compared) * totals[method]:
                    method = best
        has_chosen = compared >= FEWEST_COMPARED
        methods.append(method if has_chosen else begins)
        forecasts.append(max(told[method][now] if has_chosen else early[now], least))
    is_told = compared >= FEWEST_COMPARED and actual > 0
    losses = {name: total / actual for name, total in totals.items()} if is_told else {}
    return Choice(tuple(methods), tuple(forecasts), losses, compared)
