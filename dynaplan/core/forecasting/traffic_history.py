"""The traffic of past intervals: what forecasts are made from, and how long recent requests were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynaplan.core.forecasting.series import joined
from dynaplan.core.forecasting.warm_start import IntervalLoad
from dynaplan.domain.planning.traffic import Lengths, Traffic
from dynaplan.domain.settings.forecasting import HISTORY_INTERVALS

HALF_LIFE_S = 300.0
"""After so long the lengths of requests weigh half in what is believed of the coming ones."""

Curve = list[float | None]


@dataclass
class _Curves:
    requests: Curve
    isl_tokens: Curve
    osl_tokens: Curve


class TrafficHistory:
    """One value per adjustment interval for each curve, the newest last; it never grows beyond need.

    ``before`` is a warm-up: what another day's trace says about such intervals. The history of today counts
    from its first traffic on.
    """

    def __init__(self, interval_s: float, before: Iterable[IntervalLoad] = ()) -> None:
        self._interval_s = interval_s
        self._fade = 0.5 ** (interval_s / HALF_LIFE_S)
        warm = list(before)[-HISTORY_INTERVALS:]
        self._warm = _Curves(
            [float(each.requests) for each in warm],
            [each.isl_tokens for each in warm],
            [each.osl_tokens for each in warm],
        )
        self._live = _Curves([], [], [])
        self.isl: Lengths | None = None
        self.osl: Lengths | None = None
        self.dispersion: float | None = None
        self._dispersions = 0

    def add(self, traffic: Traffic) -> None:
        """One more interval. What lasted longer or shorter than an interval counts as if it had not."""
        requests = traffic.requests
        if requests is not None:
            requests *= self._interval_s / traffic.interval_s
        live = self._live
        for curve, value in (
            (live.requests, requests),
            (live.isl_tokens, traffic.isl_tokens),
            (live.osl_tokens, traffic.osl_tokens),
        ):
            curve.append(value)
            del curve[:-HISTORY_INTERVALS]
        self.isl = self._faded(self.isl, traffic.isl)
        self.osl = self._faded(self.osl, traffic.osl)
        if traffic.dispersion is not None:
            # One interval has few pulls: the mean, until that is the slower one.
            self._dispersions += 1
            weight, before = max(1 - self._fade, 1 / self._dispersions), self.dispersion or 0.0
            self.dispersion = before + weight * (traffic.dispersion - before)

    def curve(self, name: str) -> Curve:
        """The history of ``requests``, ``isl_tokens`` or ``osl_tokens``, warm-up included."""
        return joined(getattr(self._warm, name), getattr(self._live, name))[-HISTORY_INTERVALS:]

    @property
    def interval_s(self) -> float:
        """What one value stands for."""
        return self._interval_s

    def _faded(self, before: Lengths | None, newest: Lengths | None) -> Lengths | None:
        if newest is None or not newest.total:
            return before
        if before is None or before.upper_bounds_tokens != newest.upper_bounds_tokens:
            return newest
        return replace(before, counts=tuple(self._fade * each for each in before.counts)) + newest
