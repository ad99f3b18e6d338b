"""The traffic of past intervals: curves to forecast from, and the lengths of recent requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dynaplan.config.settings.planner import HISTORY_INTERVALS
from dynaplan.gateway.traffic import Lengths, Traffic
from dynaplan.planner.forecasting.dispersion import Dispersions, averaged_with, dispersions_of
from dynaplan.planner.forecasting.series import joined
from dynaplan.planner.forecasting.warm_start import IntervalLoad

HALF_LIFE_S = 300.0
"""Half-life of what is called recent: lengths in the histograms, mean numbers of requests, hits; s."""

FEWEST_FOR_HITS = 20
"""Requests in an interval below which its hits say too little by themselves."""

Curve = list[float | None]
"""One value per interval, the newest last; None is "no data"."""


@dataclass
class _Curves:
    """The three curves that are forecast."""

    requests: Curve
    isl_tokens: Curve
    osl_tokens: Curve


class TrafficHistory:
    """One value per adjustment interval for each curve, the newest last, as many as forecasts need.

    ``before`` is a warm-up: the intervals of another day's trace. The live history counts from its first
    traffic on. ``requests`` is the recent mean of an interval, None where none was measured. ``isl`` and
    ``osl`` are the histograms of recent requests, ``dispersion`` the recent mean of
    ``Traffic.dispersion``, ``dispersions`` that of the arrivals at several time scales. Of prompts, the
    recent tokens and the cached ones among them are kept.
    """

    def __init__(self, interval_s: float, before: Iterable[IntervalLoad] = ()) -> None:
        self._interval_s = interval_s
        self._fade = 0.5 ** (interval_s / HALF_LIFE_S)
        warm = list(before)[-HISTORY_INTERVALS:]
        self._warm = _Curves(
            [float(load.requests) for load in warm],
            [load.isl_tokens for load in warm],
            [load.osl_tokens for load in warm],
        )
        self._live = _Curves([], [], [])
        self.isl: Lengths | None = None
        self.osl: Lengths | None = None
        self.requests: float | None = None
        self.dispersion: float | None = None
        self.dispersions: Dispersions = ()
        self._intervals = self._dispersions = 0
        self._prompt_tokens = self._cached_tokens = 0.0
        self._newest_hit_rate = 1.0

    def add(self, traffic: Traffic) -> None:
        """Add an interval; one that lasted longer or shorter is scaled to the adjustment interval."""
        requests = traffic.requests
        if requests is not None:
            requests *= self._interval_s / traffic.interval_s
            self._intervals += 1
            weight, mean = max(1 - self._fade, 1 / self._intervals), self.requests or 0.0
            self.requests = mean + weight * (requests - mean)
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
        self._add_hits(traffic)
        if traffic.dispersion is not None:
            # One interval has few pulls: the mean, until that is the slower one.
            self._dispersions += 1
            weight, before = max(1 - self._fade, 1 / self._dispersions), self.dispersion or 0.0
            self.dispersion = before + weight * (traffic.dispersion - before)
            newest = dispersions_of(traffic.arrivals, traffic.interval_s)
            self.dispersions = averaged_with(self.dispersions, newest, weight)

    def _add_hits(self, traffic: Traffic) -> None:
        hit_rate, tokens = traffic.prefix_hit_rate, (traffic.requests or 0.0) * (traffic.isl_tokens or 0.0)
        if hit_rate is not None:
            self._prompt_tokens = self._fade * self._prompt_tokens + tokens
            self._cached_tokens = self._fade * self._cached_tokens + tokens * hit_rate
            self._newest_hit_rate = hit_rate if (traffic.requests or 0.0) >= FEWEST_FOR_HITS else 1.0

    @property
    def prefix_hit_rate(self) -> float | None:
        """The part of prompts' tokens that will come out of a KV cache; None where none was measured.

        The recent mean, or the newest interval's where that is lower: caches are lost at once, with a worker
        or to a load that no longer fits, and fill slowly.
        """
        if not self._prompt_tokens:
            return None
        return min(self._cached_tokens / self._prompt_tokens, self._newest_hit_rate)

    def curve(self, name: str) -> Curve:
        """Return the history of ``requests``, ``isl_tokens`` or ``osl_tokens``, warm-up included."""
        return joined(getattr(self._warm, name), getattr(self._live, name))[-HISTORY_INTERVALS:]

    @property
    def interval_s(self) -> float:
        """Length of one adjustment interval, seconds."""
        return self._interval_s

    def _faded(self, before: Lengths | None, newest: Lengths | None) -> Lengths | None:
        """Return the histogram with the old counts faded and the newest added."""
        if newest is None or not newest.total:
            return before
        if before is None or before.upper_bounds_tokens != newest.upper_bounds_tokens:
            return newest
        return replace(before, counts=tuple(self._fade * count for count in before.counts)) + newest
