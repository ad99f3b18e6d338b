"""The choice of ``auto``: the method whose forecasts cost least over the recent past.

Each method's discounted losses (below) are summed over the intervals of the series. From five
comparisons on, another method takes over when its sum is below (1 - 0.1 - 1/n) of the sum of the method in
use, n being the number of comparisons: reluctantly, and more so while little is known. Until then the
``beginning`` is used.

**After a surprise.** A load more than 3 times the usual error above its forecast is news, not noise, unless
chance makes such a number of independent requests (``arrivals.py``). It is then the least that is forecast:
learned patterns do not hold any more, and learning anew takes several intervals.

Nothing is remembered between two calls: for every interval of the series the choice is worked out as it
would have been then. So the choice, reluctance included, follows from the series alone, and the forecasts
of ``auto`` itself are known for every interval too.

**Back-test.** The cost of a forecast is 3 (actual - forecast) when it was too low, forecast - actual when too
high: the quantile ("pinball") loss of the 75th percentile, times 4 (Koenker and Bassett 1978). Too high
wastes a share of a GPU for one interval. Too low makes every request of the interval wait, and the following
ones, until the queue has been worked off. The choice of ``auto`` hardly depends on the 3: 1 to 5 choose about
equally well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from dynaplan.planner.forecasting.arrivals import exceeds_chance
from dynaplan.planner.forecasting.series import Series

UNDER_WEIGHT = 3.0
"""Cost of a forecast that is too low, over that of one that is as much too high."""

DISCOUNT = 0.97
"""Factor on the weight of an interval's error per further interval: half after 23 intervals."""


def loss(forecast: float, actual: float) -> float:
    """Return the cost of one forecast, in the unit of the curve."""
    error = actual - forecast
    return UNDER_WEIGHT * error if error > 0 else -error


@dataclass(frozen=True)
class Score:
    """Means over ``count`` forecasts, in the curve's unit: absolute error, ``loss``, and actual value."""

    count: int
    mean_error: float
    mean_loss: float
    mean_actual: float


def score(forecasts: Sequence[float], series: Series, steps: int, *, discount: float = 1.0) -> Score:
    """Hold every forecast against the interval ``steps`` later; ``discount`` lets newer ones weigh more."""
    count, weight = 0, 0.0
    error = cost = actual = 0.0
    for forecast, observed in zip(forecasts, series[steps:], strict=False):
        if observed is not None:
            count += 1
            weight = discount * weight + 1
            error = discount * error + abs(observed - forecast)
            cost = discount * cost + loss(forecast, observed)
            actual = discount * actual + observed
    if not count:
        return Score(0, 0.0, 0.0, 0.0)
    return Score(count, error / weight, cost / weight, actual / weight)


SWITCH_MARGIN = 0.1
"""Part of its loss by which the method in use must be beaten before another one takes its place."""

MIN_COMPARED = 5
"""Forecasts with a known outcome that are needed before any choice."""

NEWS_RATIO = 3.0
"""Multiple of the usual error above its forecast from which a load is news. With normal errors it happens
in one interval of a hundred."""


@dataclass(frozen=True)
class Choice:
    """The methods and forecasts of every interval; ``losses`` are relative to the mean load, as of now.

    ``compared`` counts the forecasts with a known outcome; there are no losses while they are too few.
    """

    methods: tuple[str, ...]
    forecasts: tuple[float, ...]
    losses: Mapping[str, float]
    compared: int

    @property
    def why(self) -> str:
        """Name the method, and the losses of the others."""
        method = self.methods[-1]
        if not self.losses:
            return f"auto: {method}, because only {self.compared} forecasts can be compared yet"
        others = (f"{name} {loss:.3f}" for name, loss in self.losses.items() if name != method)
        stays = "" if self.losses[method] <= min(self.losses.values()) else "; none is clearly better"
        return (
            f"auto: {method}, weighted error {self.losses[method]:.3f} of the load over the last "
            f"{self.compared} intervals ({', '.join(others)}{stays})"
        )


def choose(
    forecasts_by_method: Mapping[str, Sequence[float]],
    series: Series,
    steps: int,
    beginning: tuple[str, Sequence[float]] | None = None,
    *,
    is_count: bool = False,
) -> Choice:
    """Choose among methods, from the forecasts of each for every interval of the series.

    ``beginning`` (a name and its forecasts, of the intervals before ``first_choice``) is used until
    ``MIN_COMPARED`` outcomes are known, by default the first method; of equally good methods the one that
    comes first is chosen. ``is_count``: the values are numbers of requests.
    """
    method = next(iter(forecasts_by_method))
    begins, early = beginning or (method, forecasts_by_method[method])
    totals = dict.fromkeys(forecasts_by_method, 0.0)
    methods: list[str] = []
    forecasts: list[float] = []
    compared, weight, actual, error = 0, 0.0, 0.0, 0.0
    for now, observed in enumerate(series):
        least = 0.0
        if observed is not None and now >= steps:
            surprise = observed - forecasts[now - steps]
            may_be_news = not is_count or exceeds_chance(observed, forecasts[now - steps])
            if compared >= MIN_COMPARED and may_be_news and surprise > NEWS_RATIO * error / weight:
                least = observed
            error = DISCOUNT * error + abs(surprise)
            compared += 1
            weight, actual = DISCOUNT * weight + 1, DISCOUNT * actual + observed
            for name, made in forecasts_by_method.items():
                totals[name] = DISCOUNT * totals[name] + loss(made[now - steps], observed)
            if compared >= MIN_COMPARED:
                best = min(totals, key=totals.__getitem__)
                if totals[best] < (1 - SWITCH_MARGIN - 1 / compared) * totals[method]:
                    method = best
        has_chosen = compared >= MIN_COMPARED
        methods.append(method if has_chosen else begins)
        forecasts.append(max(forecasts_by_method[method][now] if has_chosen else early[now], least))
    is_known = compared >= MIN_COMPARED and actual > 0
    losses = {name: total / actual for name, total in totals.items()} if is_known else {}
    return Choice(tuple(methods), tuple(forecasts), losses, compared)


def first_choice(series: Series, steps: int) -> int:
    """Return the interval from which on ``choose`` knows enough outcomes; the series' length where none."""
    known = (now for now in range(steps, len(series)) if series[now] is not None)
    return next(islice(known, MIN_COMPARED - 1, None), len(series))
